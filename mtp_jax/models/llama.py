"""Llama (2 to 3.3), Qwen2, Qwen3 (dense) and MiMo-7B: grouped-query attention and a gated feed-forward in every layer.

They are one architecture; what differs is which projections have biases, whether queries and keys are normed, and the
layout of MTP layers. SmolLM2 is a Llama. MTP layers are optional: Llama and Qwen models have none as released, and one
in DeepSeek-V3's layout (`model.layers.{num_layers}.eh_proj`, ...) when somebody trained it.
"""

from collections.abc import Collection
from dataclasses import dataclass

from mtp_jax.core.errors import ConfigError
from mtp_jax.models.decoder import MtpDecoder, read_decoder
from mtp_jax.models.gqa import GqaConfig
from mtp_jax.models.hf_config import HfConfig
from mtp_jax.models.mtp_layout import DEEPSEEK_MTP, MIMO_MTP, MtpLayout
from mtp_jax.models.rope import read_rope, rotary_channels


@dataclass(frozen=True)
class LlamaKind:
    """What a `model_type` fixes, whatever the config says; None: the config's `attention_bias` decides.

    `num_kv_heads` and `head_channels` stand in for absent fields; None: as many as query heads, and the hidden size
    split over them.
    """

    name: str
    has_qkv_bias: bool | None
    has_out_bias: bool | None
    has_qk_norm: bool = False
    num_kv_heads: int | None = None
    head_channels: int | None = None
    knows_windows: bool = False
    mtp: MtpLayout = DEEPSEEK_MTP

    def read(self, config: HfConfig, tensor_names: Collection[str] | None) -> MtpDecoder:
        """The family of a config; fields absent from it take the released code's defaults."""
        if self.knows_windows:
            refuse_window(config)
        attention = read_gqa(self, config)
        return read_decoder(
            config,
            tensor_names,
            name=self.name,
            attention=attention,
            rms_norm_eps=attention.rms_norm_eps,
            mtp=self.mtp,
            recycle_after_head_norm=True,
        )


def read_gqa(kind: LlamaKind, config: HfConfig) -> GqaConfig:
    """The attention of a config."""
    num_heads = config.integer("num_attention_heads")
    channels = config.integer("head_dim", kind.head_channels or config.integer("hidden_size") // num_heads)
    rope, _ = read_rope(config, rotary_channels(config, channels, default_fraction=1.0))
    has_bias = config.flag("attention_bias", False)
    return GqaConfig(
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", kind.num_kv_heads or num_heads),
        head_channels=channels,
        rope=rope,
        has_qkv_bias=has_bias if kind.has_qkv_bias is None else kind.has_qkv_bias,
        has_out_bias=has_bias if kind.has_out_bias is None else kind.has_out_bias,
        has_qk_norm=kind.has_qk_norm,
        rms_norm_eps=config.positive("rms_norm_eps", 1e-6),
    )


def refuse_window(config: HfConfig) -> None:
    """`ConfigError` if some layer would attend a window only. The size of a window that no layer has says nothing."""
    config.ignore("sliding_window")
    num_layers, num_full = config.integer("num_hidden_layers"), config.integer("max_window_layers", 28, at_least=0)
    if config.flag("use_sliding_window", False) and num_full < num_layers:
        raise ConfigError(
            f"config field 'use_sliding_window' is true and 'max_window_layers' is {num_full}, so layers from "
            f"{num_full} to {num_layers - 1} would attend a sliding window, which this family does not have here; "
            f"allowed: false, or max_window_layers of at least {num_layers}."
        )


LLAMA = LlamaKind("llama", has_qkv_bias=None, has_out_bias=None)
QWEN2 = LlamaKind("qwen2", has_qkv_bias=True, has_out_bias=False, num_kv_heads=32, knows_windows=True)
QWEN3 = LlamaKind(
    "qwen3",
    has_qkv_bias=None,
    has_out_bias=None,
    has_qk_norm=True,
    num_kv_heads=32,
    head_channels=128,
    knows_windows=True,
)
MIMO = LlamaKind("mimo", has_qkv_bias=True, has_out_bias=False, num_kv_heads=32, knows_windows=True, mtp=MIMO_MTP)
