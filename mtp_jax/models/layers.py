"""Layers that every family is built of: norm, gated feed-forward."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mtp_jax.models.params import Packing, param, rows, same
from mtp_jax.ops.sharding import Parallel


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


def merge_heads(x_BWHC: Float[Array, "B W H C"], out_HCD: Float[Array, "H C D"]) -> Float[Array, "B W D"]:
    """The output projection of attention: the product over heads and channels together.

    Written over one flat dimension: given two, XLA may contract them in the other order and copy the weights for it.
    """
    x_BWE = x_BWHC.reshape(*x_BWHC.shape[:2], -1)
    return jnp.einsum("bwe,ed->bwd", x_BWE, out_HCD.reshape(x_BWE.shape[-1], -1))


def gated(gate_up: Float[Array, "*x 2 F"]) -> Float[Array, "*x F"]:
    """silu(gate) * up of a fused gate-and-up product."""
    return jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]


def gate_up_packing(hidden_size: int, ffn_size: int, name: str) -> Packing:
    """Gate and up as one product [D, 2, F], so that F can be sharded."""
    names = [f"{name}.gate_proj.weight", f"{name}.up_proj.weight"]
    return rows(names, [ffn_size] * 2, hidden_size).reshape(2, ffn_size, hidden_size).transpose(2, 0, 1)


class Mlp(nnx.Module):
    """Gated feed-forward. `name` is the checkpoint's prefix."""

    def __init__(self, hidden_size: int, ffn_size: int, name: str):
        self.gate_up = param(gate_up_packing(hidden_size, ffn_size, name), (None, None, "ffn"))
        self.down = param(same(f"{name}.down_proj.weight", hidden_size, ffn_size).transpose(1, 0), ("ffn", None))

    def partial(self, x_TD: Float[Array, "*x D"]) -> Float[Array, "*x D"]:
        """This shard's part of the result; the sum over the `model` axis is the whole."""
        gate_up = jnp.einsum("...d,dkf->...kf", x_TD, self.gate_up[...])
        return jnp.einsum("...f,fd->...d", gated(gate_up), self.down[...])

    def __call__(self, x_TD: Float[Array, "*x D"], parallel: Parallel) -> Float[Array, "*x D"]:
        return parallel.sum_over_model(self.partial(x_TD))
