"""What every family's layers are built of: norm, bias, gate."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mtp_jax.models.params import Packing, param, rows, same


def rms_norm(x: Float[Array, "*x D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*x D"]:
    """Root-mean-square norm: x / sqrt(mean(x^2) + eps) * weight, in float32; the result has x's dtype.

    The weight multiplies as it is (not 1 + weight).
    """
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    weight32 = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape)
    return (x32 * scale * weight32).astype(x.dtype)


class RmsNorm(nnx.Module):
    """`rms_norm` with its weight. `name` is the checkpoint tensor."""

    def __init__(self, size: int, eps: float, name: str):
        self.eps = eps
        self.weight = param(same(name, size), (None,), fill=1.0)

    def __call__(self, x: Float[Array, "*x D"]) -> Float[Array, "*x D"]:
        return rms_norm(x, self.weight[...], self.eps)


def with_bias(x: Float[Array, "*x"], bias: nnx.Param | None) -> Float[Array, "*x"]:
    """A product plus its bias, where there is one; the bias has the product's last dimensions."""
    if bias is None:
        return x
    return x + bias[...].reshape((1,) * (x.ndim - bias[...].ndim) + bias[...].shape)


def gated(gate_up: Float[Array, "*x 2 F"]) -> Float[Array, "*x F"]:
    """silu(gate) * up of a fused gate-and-up product."""
    return jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]


def gate_up_packing(hidden_size: int, ffn_size: int, name: str) -> Packing:
    """Gate and up as one product [D, 2, F], so that F can be sharded."""
    names = [f"{name}.gate_proj.weight", f"{name}.up_proj.weight"]
    return rows(names, [ffn_size] * 2, hidden_size).reshape(2, ffn_size, hidden_size).transpose(2, 0, 1)
