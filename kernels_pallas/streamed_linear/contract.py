"""The contract that every backend of the streamed linear product fulfils.

    out_RN = run(form, x_RD, w, norm_weight_D, residual_RN)

`x @ w`, summed in float32, with what surrounds a product in a decoder:
- before it, if `form.norm_eps` is not None, the root-mean-square norm of x: x / sqrt(mean(x^2) + eps) * norm_weight;
- behind it, if `form.is_gated`, silu(gate) * up, where the first half of w's outputs are gates and the second ups;
- last, if there is a residual, the sum with it.

`w` is [D, N], or [N, D] if `form.is_out_major` (a vocabulary's table); N counts both halves of gated weights. The
result is rounded once, to `form.out_dtype`, at the end. With a norm, x times the norm's weight is rounded before the
product; whether x was divided by its size before or the sums are after is the backend's choice.

A row's result never depends on what is in other rows. In kernels of our own it does not depend on how many there are
either: the same row gives the same bits in a launch of one row and in one of sixty-four. XLA promises no such thing.

R rows, D channels in, N channels out.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Form:
    """What is done around the product, and how the weights lie."""

    norm_eps: float | None = None
    is_gated: bool = False
    is_out_major: bool = False
    out_dtype: str = "bfloat16"


PLAIN = Form()


@dataclass(frozen=True)
class Problem:
    """The static facts of a call: what a backend needs to say whether it can."""

    num_rows: int  # R
    in_channels: int  # D
    out_channels: int  # channels of the result: half of N for gated weights
    dtype: str
    form: Form
    has_residual: bool = False

    @classmethod
    def of(cls, form: Form, x_RD: jax.Array, w: jax.Array, residual_RN: jax.Array | None = None) -> "Problem":
        """Reads the facts off a call's arrays."""
        outputs = w.shape[0 if form.is_out_major else 1]
        return cls(
            num_rows=x_RD.shape[0],
            in_channels=x_RD.shape[1],
            out_channels=outputs // 2 if form.is_gated else outputs,
            dtype=jnp.dtype(w.dtype).name,
            form=form,
            has_residual=residual_RN is not None,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights: what a product of few rows must move."""
        outputs = self.out_channels * (2 if self.form.is_gated else 1)
        return self.in_channels * outputs * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Backend:
    """One implementation of the contract: `run` takes its arguments, `supports` gives the reason why not, or None."""

    run: Callable[..., jax.Array]
    supports: Callable[[Problem], str | None]
