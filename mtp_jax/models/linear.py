"""Products with weights, and what stands around them in a layer, by the backend that a family names.

"xla" writes them out one after the other. Any other backend is one of `kernels_pallas.streamed_linear`, made for the
few rows of a decoding step: norm, product, gate and sum in one kernel that reads the weights once. Prompts have more
rows than such a kernel takes, and go through XLA under every backend.
"""

import math

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kernels_pallas.streamed_linear import BACKENDS, Form, Problem, streamed_linear, supports
from mtp_jax.core.errors import ConfigError
from mtp_jax.models.layers import RmsNorm, gate_up_packing, gated, with_bias
from mtp_jax.models.params import param, same
from mtp_jax.ops.sharding import Parallel

XLA = "xla"
MAX_STREAMED_ROWS = 64
"""More rows than these are no longer a matter of reading weights: XLA's product has them."""


def check_linear_backend(name: str) -> None:
    """`ConfigError` unless there is a backend of that name."""
    if name not in BACKENDS:
        raise ConfigError(f"linear_backend is {name!r}; it must be one of {', '.join(map(repr, BACKENDS))}.")


def linear(
    x: Float[Array, "*x D"],
    w: Float[Array, "D ..."],
    backend: str,
    *,
    norm: RmsNorm | None = None,
    is_gated: bool = False,
    residual: Float[Array, "*x N"] | None = None,
) -> Float[Array, "*x N"]:
    """[residual +] [gate of] [norm of] x @ w, with the weights' last dimensions as one; in x's dtype.

    Gated weights are [D, 2, F]: gates, then ups.
    """
    w_DN = w.reshape(w.shape[0], -1)
    form = Form(norm_eps=None if norm is None else norm.eps, is_gated=is_gated, out_dtype=x.dtype.name)
    num_rows = math.prod(x.shape[:-1])
    if backend != XLA and num_rows <= MAX_STREAMED_ROWS:
        out_RN = streamed_linear(
            x.reshape(num_rows, -1),
            w_DN,
            backend=backend,
            form=form,
            norm_weight_D=None if norm is None else norm.weight[...],
            residual_RN=None if residual is None else residual.reshape(num_rows, -1),
        )
        return out_RN.reshape(*x.shape[:-1], -1)
    if norm is not None:
        x = norm(x)
    out = jnp.einsum("...d,dn->...n", x, w_DN)
    if is_gated:
        out = gated(out.reshape(*x.shape[:-1], 2, -1))
    return out if residual is None else residual + out


def logits(x: Float[Array, "*x D"], table_VD: Float[Array, "V D"], backend: str) -> Float[Array, "*x V"]:
    """Float32 products with every row of a vocabulary's table."""
    num_rows = math.prod(x.shape[:-1])
    if backend != XLA and num_rows <= MAX_STREAMED_ROWS:
        form = Form(is_out_major=True, out_dtype="float32")
        out_RV = streamed_linear(x.reshape(num_rows, -1), table_VD, backend=backend, form=form)
        return out_RV.reshape(*x.shape[:-1], -1)
    return jnp.einsum("...d,vd->...v", x, table_VD, preferred_element_type=jnp.float32)


def problem_with(backend: str, in_channels: int, out_channels: int, dtype: str) -> str | None:
    """Why the backend cannot multiply with weights of this size, or None."""
    return supports(backend, Problem(1, in_channels, out_channels, dtype, Form()))


def merge_heads(
    x_BWHC: Float[Array, "B W H C"],
    out_HCD: Float[Array, "H C D"],
    bias: nnx.Param | None,
    backend: str,
    parallel: Parallel,
    residual_BWD: Float[Array, "B W D"] | None = None,
) -> Float[Array, "B W D"]:
    """The output projection of attention, summed over the `model` axis, with its bias; added to the residual.

    Heads and channels are one dimension: given two, XLA may contract them in the other order and copy the weights for
    it.
    """
    x_BWE = x_BWHC.reshape(*x_BWHC.shape[:2], -1)
    out_ED = out_HCD.reshape(x_BWE.shape[-1], -1)
    if parallel.model is None and bias is None:
        return linear(x_BWE, out_ED, backend, residual=residual_BWD)
    out_BWD = with_bias(parallel.sum_over_model(linear(x_BWE, out_ED, backend)), bias)
    return out_BWD if residual_BWD is None else residual_BWD + out_BWD


class Mlp(nnx.Module):
    """Gated feed-forward. `name` is the checkpoint's prefix."""

    def __init__(self, hidden_size: int, ffn_size: int, name: str, linear_backend: str = XLA):
        self.linear_backend = linear_backend
        self.gate_up = param(gate_up_packing(hidden_size, ffn_size, name), (None, None, "ffn"))
        self.down = param(same(f"{name}.down_proj.weight", hidden_size, ffn_size).transpose(1, 0), ("ffn", None))

    def partial(
        self, x: Float[Array, "*x D"], norm: RmsNorm | None = None, residual: Float[Array, "*x D"] | None = None
    ) -> Float[Array, "*x D"]:
        """This shard's part of the result; the sum over the `model` axis is the whole."""
        hidden = linear(x, self.gate_up[...], self.linear_backend, norm=norm, is_gated=True)
        return linear(hidden, self.down[...], self.linear_backend, residual=residual)

    def __call__(
        self,
        x: Float[Array, "*x D"],
        parallel: Parallel,
        norm: RmsNorm | None = None,
        residual: Float[Array, "*x D"] | None = None,
    ) -> Float[Array, "*x D"]:
        """The feed-forward of [norm of] x; added to the residual."""
        if parallel.model is None:
            return self.partial(x, norm, residual)
        out = parallel.sum_over_model(self.partial(x, norm))
        return out if residual is None else residual + out
