"""The streamed linear product in plain XLA: the oracle of the other backends, and the path for every platform."""

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.streamed_linear.contract import Form, Problem


def supports(problem: Problem) -> str | None:  # noqa: ARG001 - it can do any
    """None: it can do every problem."""
    return None


def linear_reference(
    form: Form,
    x_RD: jax.Array,
    w: jax.Array,
    norm_weight_D: jax.Array | None = None,
    residual_RN: jax.Array | None = None,
) -> jax.Array:
    """See `contract`. The norm's result is rounded to x's dtype, as a decoder written without this package does."""
    if form.norm_eps is not None and norm_weight_D is not None:
        x32_RD = x_RD.astype(jnp.float32)
        scale_R1 = lax.rsqrt(jnp.mean(jnp.square(x32_RD), axis=-1, keepdims=True) + form.norm_eps)
        x_RD = (x32_RD * scale_R1 * norm_weight_D.astype(jnp.float32)[None]).astype(x_RD.dtype)
    contracted = (1,) if form.is_out_major else (0,)
    out_RN = lax.dot_general(x_RD, w, (((1,), contracted), ((), ())), preferred_element_type=jnp.float32)
    if form.is_gated:
        gate_RN, up_RN = jnp.split(out_RN, 2, axis=-1)
        out_RN = jax.nn.silu(gate_RN) * up_RN
    if residual_RN is not None:
        out_RN = out_RN + residual_RN.astype(jnp.float32)
    return out_RN.astype(form.out_dtype)
