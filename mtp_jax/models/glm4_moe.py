"""GLM-4.5 (arXiv 2508.06471): grouped-query attention with partial rotary embedding, experts and MTP as DeepSeek-V3."""

from collections.abc import Collection

from mtp_jax.models.decoder import MtpDecoder, read_decoder
from mtp_jax.models.gqa import GqaConfig
from mtp_jax.models.hf_config import HfConfig
from mtp_jax.models.moe import read_moe_config
from mtp_jax.models.mtp_layout import DEEPSEEK_MTP
from mtp_jax.models.rope import read_rope, rotary_channels


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
        has_qkv_bias=config.flag("attention_bias", False),
        has_out_bias=False,
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
        mtp=DEEPSEEK_MTP,
        recycle_after_head_norm=False,
    )
