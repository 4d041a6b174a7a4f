"""The contract that every grouped-matmul backend fulfils.

    out_PF = run(x_PD, w_XDF, num_rows_X)

Rows are sorted by expert: the first `num_rows[0]` belong to expert 0, the next `num_rows[1]` to expert 1, and so on.
- `out[p] = x[p] @ w[expert of p]`, summed in float32, in x's dtype.
- Rows behind the last expert's are zero.
- What is in other rows, or in the weights of experts without rows, never reaches a row, NaN included. (The reference,
  which is XLA's own form, may multiply it by zero.)
- `num_rows` is an array on the device.

P rows, X experts, D channels in, F channels out.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Problem:
    """The static shape facts of a call: what a backend needs to say whether it can."""

    num_rows: int  # P
    num_experts: int  # X
    in_channels: int  # D
    out_channels: int  # F
    dtype: str

    @classmethod
    def of(cls, x_PD: jax.Array, w_XDF: jax.Array) -> "Problem":
        """Reads the facts off a call's arrays."""
        num_experts, in_channels, out_channels = w_XDF.shape
        return cls(x_PD.shape[0], num_experts, in_channels, out_channels, jnp.dtype(w_XDF.dtype).name)


@dataclass(frozen=True)
class Backend:
    """One implementation of the contract: `run` takes its arguments, `supports` gives the reason why not, or None."""

    run: Callable[..., jax.Array]
    supports: Callable[[Problem], str | None]
