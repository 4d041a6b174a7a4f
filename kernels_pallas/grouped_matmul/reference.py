"""The grouped matmul of XLA: the oracle of the other backends, and the path for every platform."""

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.grouped_matmul.contract import Problem


def supports(problem: Problem) -> str | None:  # noqa: ARG001 - it can do any
    """None: it can do every problem."""
    return None


def grouped_matmul_reference(x_PD: jax.Array, w_XDF: jax.Array, num_rows_X: jax.Array) -> jax.Array:
    """See `contract`."""
    out_PF = lax.ragged_dot(x_PD, w_XDF, num_rows_X.astype(jnp.int32), preferred_element_type=jnp.float32)
    return out_PF.astype(x_PD.dtype)
