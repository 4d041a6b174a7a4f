"""DeepSeek-V3 / R1 (arXiv 2412.19437): multi-head latent attention, always in its absorbed form.

A position's KV is one vector: the normalised latent c (R channels) and one rotary key shared by all heads. With
q_nope . (W_UK c) = (W_UK^T q_nope) . c the queries are taken into the latent space, so attention runs with one KV head
whose values are the first R channels of its keys, and W_UV is applied to the result.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from mtp_jax.core.errors import ConfigError
from mtp_jax.core.types import KVSpec
from mtp_jax.models.api import Attend
from mtp_jax.models.decoder import MtpDecoder, read_decoder
from mtp_jax.models.hf_config import HfConfig
from mtp_jax.models.layers import RmsNorm, with_bias
from mtp_jax.models.linear import XLA, linear, merge_heads
from mtp_jax.models.moe import read_moe_config
from mtp_jax.models.mtp_layout import DEEPSEEK_MTP
from mtp_jax.models.params import param, rows, same
from mtp_jax.models.rope import Rope, Rotation, pair_order, read_rope, rotary_channels
from mtp_jax.ops.sharding import Parallel

LATENT_NORM_EPS = 1e-6
"""The released code gives the two latent norms this constant, whatever the config's `rms_norm_eps`."""


@dataclass(frozen=True)
class MlaConfig:
    """Sizes of latent attention. `q_rank` None: queries come straight from the hidden state."""

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_channels: int
    v_channels: int
    rope: Rope
    is_interleaved: bool
    has_bias: bool
    scale: float

    def kv_spec(self) -> KVSpec:
        """Latent and rotary key, a full copy on every shard."""
        return KVSpec(num_kv_heads=1, k_channels=self.kv_rank + self.rope.num_channels, v_channels=None, axis=None)

    def build(self, hidden_size: int, name: str, *, linear_backend: str = XLA) -> "Mla":
        """The module whose checkpoint tensors start with `name`."""
        return Mla(hidden_size, self, name, linear_backend)

    def rope_last(self, num_plain: int) -> np.ndarray:
        """Order of `num_plain` channels followed by the rotary ones."""
        order = pair_order(self.rope.num_channels, "interleaved" if self.is_interleaved else "halves")
        return np.concatenate([np.arange(num_plain), num_plain + order])


class Mla(nnx.Module):
    """Latent attention with its projections. What leads from the hidden state to latents is one product, `down`."""

    def __init__(self, hidden_size: int, config: MlaConfig, name: str, linear_backend: str):
        self.config = config
        self.linear_backend = linear_backend
        heads, rotary = config.num_heads, config.rope.num_channels
        qk_channels, latent = config.nope_channels + rotary, config.kv_rank + rotary
        kv_order = config.rope_last(config.kv_rank)
        if config.q_rank is None:
            names, sizes, order = ["kv_a_proj_with_mqa"], [latent], kv_order
            q_name, q_size, q_norm = "q_proj", hidden_size, None
        else:
            names, sizes = ["q_a_proj", "kv_a_proj_with_mqa"], [config.q_rank, latent]
            order = np.concatenate([np.arange(config.q_rank), config.q_rank + kv_order])
            q_name, q_size = "q_b_proj", config.q_rank
            q_norm = RmsNorm(config.q_rank, LATENT_NORM_EPS, f"{name}.q_a_layernorm.weight")
        self.q_norm = q_norm
        down = rows([f"{name}.{part}.weight" for part in names], sizes, hidden_size)
        self.down = param(down.take(order).transpose(1, 0), (None, None))
        self.kv_norm = RmsNorm(config.kv_rank, LATENT_NORM_EPS, f"{name}.kv_a_layernorm.weight")
        head_order = config.rope_last(config.nope_channels)
        q_order = np.concatenate([head * qk_channels + head_order for head in range(heads)])
        q = same(f"{name}.{q_name}.weight", heads * qk_channels, q_size).take(q_order).transpose(1, 0)
        self.q = param(q.reshape(q_size, heads, qk_channels), (None, "heads", None))
        up_channels = config.nope_channels + config.v_channels
        up = same(f"{name}.kv_b_proj.weight", heads * up_channels, config.kv_rank)
        self.kv_up = param(up.reshape(heads, up_channels, config.kv_rank), ("heads", None, None))
        out = same(f"{name}.o_proj.weight", hidden_size, heads * config.v_channels).transpose(1, 0)
        self.out = param(out.reshape(heads, config.v_channels, hidden_size), ("heads", None, None))
        down_bias = rows([f"{name}.{part}.bias" for part in names], sizes).take(order)
        self.down_bias = param(down_bias, (None,), fill=0.0) if config.has_bias else None
        out_bias = same(f"{name}.o_proj.bias", hidden_size)
        self.out_bias = param(out_bias, (None,), fill=0.0) if config.has_bias else None

    def __call__(
        self,
        x_BWD: Float[Array, "B W D"],
        rotation: Rotation,
        layer_kv: Any,
        attend: Attend,
        parallel: Parallel,
        norm: RmsNorm | None = None,
        residual_BWD: Float[Array, "B W D"] | None = None,
    ) -> tuple[Float[Array, "B W D"], Any]:
        config, backend = self.config, self.linear_backend
        q_rank, kv_rank = config.q_rank or 0, config.kv_rank
        down = with_bias(linear(x_BWD, self.down[...], backend, norm=norm), self.down_bias)
        if self.q_norm is None:
            q = linear(x_BWD, self.q[...], backend, norm=norm)
        else:
            q = linear(down[..., :q_rank], self.q[...], backend, norm=self.q_norm)
        q_BWHC = q.reshape(*x_BWD.shape[:2], -1, self.q[...].shape[-1])
        latent_BWR = self.kv_norm(down[..., q_rank : q_rank + kv_rank])
        k_rope_BWGC = rotation.apply(down[..., None, q_rank + kv_rank :])
        q_rope_BWHC = rotation.apply(q_BWHC[..., config.nope_channels :])
        key_up_HCR = self.kv_up[:, : config.nope_channels]
        value_up_HER = self.kv_up[:, config.nope_channels :]
        q_latent_BWHR = product_per_head(q_BWHC[..., : config.nope_channels], key_up_HCR, 1)
        attended_BWHR, layer_kv = attend(
            layer_kv,
            jnp.concatenate([q_latent_BWHR.astype(x_BWD.dtype), q_rope_BWHC], axis=-1),
            jnp.concatenate([latent_BWR[:, :, None, :], k_rope_BWGC], axis=-1),
            None,
            scale=config.scale,
            v_channels=kv_rank,
        )
        values_BWHE = product_per_head(attended_BWHR, value_up_HER, 2)
        values_BWHE = values_BWHE.astype(x_BWD.dtype)
        return merge_heads(values_BWHE, self.out[...], self.out_bias, backend, parallel, residual_BWD), layer_kv


def product_per_head(x_BWHC: Float[Array, "B W H C"], w_HIO: Float[Array, "H I O"], contracted: int) -> Array:
    """Float32 product of each head with its own matrix, over dimension `contracted` of `w_HIO`.

    Heads are the leading dimension of both operands: `einsum` leaves that to the compiler, and on a CPU three times
    as slow a product comes out of it (25 against 8 us for 4 rows, 8 heads of 32 channels, rank 128).
    """
    x_HTC = x_BWHC.reshape(-1, *x_BWHC.shape[2:]).swapaxes(0, 1)
    out_HTE = lax.dot_general(x_HTC, w_HIO, (((2,), (contracted,)), ((0,), (0,))), preferred_element_type=jnp.float32)
    return out_HTE.swapaxes(0, 1).reshape(*x_BWHC.shape[:3], -1)


def deepseek_v3(config: HfConfig, tensor_names: Collection[str] | None) -> MtpDecoder:
    """The family of a `deepseek_v3` config; fields absent from it take the released code's defaults."""
    nope_channels = config.integer("qk_nope_head_dim")
    rope_channels = config.integer("qk_rope_head_dim", at_least=2)
    if rotary_channels(config, rope_channels, default_fraction=1.0) != rope_channels:
        raise ConfigError("config field 'partial_rotary_factor' must be 1: all qk_rope_head_dim channels rotate.")
    rope, mscale = read_rope(config, rope_channels)
    attention = MlaConfig(
        num_heads=config.integer("num_attention_heads"),
        q_rank=None if config.get("q_lora_rank") is None else config.integer("q_lora_rank"),
        kv_rank=config.integer("kv_lora_rank"),
        nope_channels=nope_channels,
        v_channels=config.integer("v_head_dim"),
        rope=rope,
        is_interleaved=config.flag("rope_interleave", True),
        has_bias=config.flag("attention_bias", False),
        scale=(nope_channels + rope_channels) ** -0.5 * mscale**2,
    )
    return read_decoder(
        config,
        tensor_names,
        name="deepseek_v3",
        attention=attention,
        moe=read_moe_config(config, num_groups=8, num_active_groups=4, scale=2.5),
        num_dense_layers=3,
        rms_norm_eps=1e-6,
        mtp=DEEPSEEK_MTP,
        recycle_after_head_norm=True,
    )
