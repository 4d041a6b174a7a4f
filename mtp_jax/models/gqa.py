"""Grouped-query attention: what GLM-4.5, the Llama family and Eagle3 drafters share.

Queries, keys and values are one product, laid out by KV head: the J queries of a head, then its key, then its value.
So a shard of the KV heads holds all that it needs, and tensor parallelism goes as far as there are KV heads.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from mtp_jax.core.errors import ConfigError
from mtp_jax.core.types import KVSpec
from mtp_jax.models.api import Attend
from mtp_jax.models.layers import RmsNorm, with_bias
from mtp_jax.models.linear import XLA, linear, merge_heads
from mtp_jax.models.params import param, rows, same
from mtp_jax.models.rope import Rope, Rotation
from mtp_jax.ops.sharding import Parallel


@dataclass(frozen=True)
class GqaConfig:
    """Sizes of grouped-query attention, and which of its projections have biases."""

    num_heads: int
    num_kv_heads: int
    head_channels: int
    rope: Rope
    has_qkv_bias: bool
    has_out_bias: bool
    has_qk_norm: bool
    rms_norm_eps: float

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"config field 'num_key_value_heads' is {self.num_kv_heads}; "
                f"it must divide num_attention_heads={self.num_heads}."
            )

    def kv_spec(self) -> KVSpec:
        """Key and value of each KV head."""
        return KVSpec(self.num_kv_heads, self.head_channels, self.head_channels, axis="kv_heads")

    def build(self, hidden_size: int, name: str, *, input_size: int | None = None, linear_backend: str = XLA) -> "Gqa":
        """The module whose checkpoint tensors start with `name`; `input_size` where it takes in another width."""
        return Gqa(hidden_size, self, name, input_size or hidden_size, linear_backend)

    def rows_by_kv_head(self) -> np.ndarray:
        """Order that takes the rows of q, k and v (one below the other) KV head by KV head."""
        num_q, num_k = self.num_heads * self.head_channels, self.num_kv_heads * self.head_channels
        q_G, k_G, v_G = (
            rows.reshape(self.num_kv_heads, -1)
            for rows in np.split(np.arange(num_q + 2 * num_k), [num_q, num_q + num_k])
        )
        return np.concatenate([q_G, k_G, v_G], axis=1).reshape(-1)


class Gqa(nnx.Module):
    """Grouped-query attention with its projections, from `input_size` channels to `hidden_size`."""

    def __init__(self, hidden_size: int, config: GqaConfig, name: str, input_size: int, linear_backend: str):
        self.config = config
        self.linear_backend = linear_backend
        groups, channels = config.num_kv_heads, config.head_channels
        layout = (groups, config.num_heads // groups + 2, channels)
        parts, order = ("q_proj", "k_proj", "v_proj"), config.rows_by_kv_head()
        sizes = [heads * channels for heads in (config.num_heads, groups, groups)]
        qkv = rows([f"{name}.{part}.weight" for part in parts], sizes, input_size).take(order).transpose(1, 0)
        self.qkv = param(qkv.reshape(input_size, *layout), (None, "kv_heads", None, None))
        bias = rows([f"{name}.{part}.bias" for part in parts], sizes).take(order).reshape(*layout)
        self.qkv_bias = param(bias, ("kv_heads", None, None), fill=0.0) if config.has_qkv_bias else None
        q_norm, k_norm = (
            RmsNorm(channels, config.rms_norm_eps, f"{name}.{part}.weight") for part in ("q_norm", "k_norm")
        )
        self.q_norm, self.k_norm = (q_norm, k_norm) if config.has_qk_norm else (None, None)
        out = same(f"{name}.o_proj.weight", hidden_size, config.num_heads * channels).transpose(1, 0)
        self.out = param(out.reshape(config.num_heads, channels, hidden_size), ("heads", None, None))
        out_bias = same(f"{name}.o_proj.bias", hidden_size)
        self.out_bias = param(out_bias, (None,), fill=0.0) if config.has_out_bias else None

    def __call__(
        self,
        x_BWD: Float[Array, "B W I"],
        rotation: Rotation,
        layer_kv: Any,
        attend: Attend,
        parallel: Parallel,
        norm: RmsNorm | None = None,
        residual_BWD: Float[Array, "B W D"] | None = None,
    ) -> tuple[Float[Array, "B W D"], Any]:
        qkv = linear(x_BWD, self.qkv[...], self.linear_backend, norm=norm)
        qkv_BWGJC = with_bias(qkv.reshape(*x_BWD.shape[:2], *self.qkv[...].shape[1:]), self.qkv_bias)
        q_BWHC = qkv_BWGJC[..., :-2, :].reshape(*x_BWD.shape[:2], -1, self.config.head_channels)
        k_BWGC, v_BWGC = qkv_BWGJC[..., -2, :], qkv_BWGJC[..., -1, :]
        if self.q_norm is not None and self.k_norm is not None:
            q_BWHC, k_BWGC = self.q_norm(q_BWHC), self.k_norm(k_BWGC)
        attended_BWHC, layer_kv = attend(
            layer_kv,
            rotation.apply(q_BWHC),
            rotation.apply(k_BWGC),
            v_BWGC,
            scale=self.config.head_channels**-0.5,
            v_channels=self.config.head_channels,
        )
        out = merge_heads(attended_BWHC, self.out[...], self.out_bias, self.linear_backend, parallel, residual_BWD)
        return out, layer_kv
