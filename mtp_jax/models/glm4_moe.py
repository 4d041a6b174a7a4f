"""GLM-4.5 (arXiv 2508.06471): grouped-query attention with partial rotary embedding, experts and MTP as DeepSeek-V3.

Queries, keys and values are one product, laid out by KV head: the J queries of a head, then its key, then its value.
So a shard of the KV heads holds all that it needs, and tensor parallelism goes as far as there are KV heads.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from mtp_jax.core.errors import ConfigError
from mtp_jax.core.types import KVSpec
from mtp_jax.models.api import Attend
from mtp_jax.models.decoder import MtpDecoder, read_decoder
from mtp_jax.models.hf_config import HfConfig
from mtp_jax.models.layers import RmsNorm, merge_heads, with_bias
from mtp_jax.models.moe import read_moe_config
from mtp_jax.models.params import param, rows, same
from mtp_jax.models.rope import Rope, Rotation, read_rope, rotary_channels
from mtp_jax.ops.sharding import Parallel


@dataclass(frozen=True)
class GqaConfig:
    """Sizes of grouped-query attention."""

    num_heads: int
    num_kv_heads: int
    head_channels: int
    rope: Rope
    has_bias: bool
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

    def build(self, hidden_size: int, name: str) -> "Gqa":
        """The module whose checkpoint tensors start with `name`."""
        return Gqa(hidden_size, self, name)

    def rows_by_kv_head(self) -> np.ndarray:
        """Order that takes the rows of q, k and v (one below the other) KV head by KV head."""
        num_q, num_k = self.num_heads * self.head_channels, self.num_kv_heads * self.head_channels
        q_G, k_G, v_G = (
            rows.reshape(self.num_kv_heads, -1)
            for rows in np.split(np.arange(num_q + 2 * num_k), [num_q, num_q + num_k])
        )
        return np.concatenate([q_G, k_G, v_G], axis=1).reshape(-1)


class Gqa(nnx.Module):
    """Grouped-query attention with its projections."""

    def __init__(self, hidden_size: int, config: GqaConfig, name: str):
        self.config = config
        groups, channels = config.num_kv_heads, config.head_channels
        layout = (groups, config.num_heads // groups + 2, channels)
        parts, order = ("q_proj", "k_proj", "v_proj"), config.rows_by_kv_head()
        sizes = [heads * channels for heads in (config.num_heads, groups, groups)]
        qkv = rows([f"{name}.{part}.weight" for part in parts], sizes, hidden_size).take(order).transpose(1, 0)
        self.qkv = param(qkv.reshape(hidden_size, *layout), (None, "kv_heads", None, None))
        bias = rows([f"{name}.{part}.bias" for part in parts], sizes).take(order).reshape(*layout)
        self.qkv_bias = param(bias, ("kv_heads", None, None), fill=0.0) if config.has_bias else None
        q_norm, k_norm = (
            RmsNorm(channels, config.rms_norm_eps, f"{name}.{part}.weight") for part in ("q_norm", "k_norm")
        )
        self.q_norm, self.k_norm = (q_norm, k_norm) if config.has_qk_norm else (None, None)
        out = same(f"{name}.o_proj.weight", hidden_size, config.num_heads * channels).transpose(1, 0)
        self.out = param(out.reshape(config.num_heads, channels, hidden_size), ("heads", None, None))

    def __call__(
        self, x_BWD: Float[Array, "B W D"], rotation: Rotation, layer_kv: Any, attend: Attend, parallel: Parallel
    ) -> tuple[Float[Array, "B W D"], Any]:
        qkv_BWGJC = with_bias(jnp.einsum("bwd,dgjc->bwgjc", x_BWD, self.qkv[...]), self.qkv_bias)
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
        return parallel.sum_over_model(merge_heads(attended_BWHC, self.out[...])), layer_kv


def glm4_moe(config: HfConfig, tensor_names: Collection[str] | None) -> MtpDecoder:
    """The family of a `glm4_moe` config; fields absent from it take the released code's defaults."""
    num_heads = config.integer("num_attention_heads")
    head_channels = config.integer("head_dim", config.integer("hidden_size") // num_heads)
    rope, _ = read_rope(config, rotary_channels(config, head_channels, default_fraction=0.5))
    rms_norm_eps = config.positive("rms_norm_eps", 1e-5)
    attention = GqaConfig(
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_channels=head_channels,
        rope=rope,
        has_bias=config.flag("attention_bias", False),
        has_qk_norm=config.flag("use_qk_norm", False),
        rms_norm_eps=rms_norm_eps,
    )
    return read_decoder(
        config,
        tensor_names,
        name="glm4_moe",
        attention=attention,
        moe=read_moe_config(config, num_groups=1, num_active_groups=1, scale=1.0),
        num_dense_layers=1,
        rms_norm_eps=rms_norm_eps,
        recycle_after_head_norm=False,
    )
