"""Configs of many shapes of each family, small enough to compute by hand."""

from collections.abc import Mapping
from typing import Any

_COMMON = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 128,
    "rope_theta": 100.0,
    "num_nextn_predict_layers": 1,
    "eos_token_id": [1, 2],
    "initializer_range": 0.3,
}
_EXPERTS = {
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
_BASES: Mapping[str, dict[str, Any]] = {
    "deepseek_v3": {
        **_EXPERTS,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
        "routed_scaling_factor": 2.5,
    },
    "glm4_moe": {
        **_EXPERTS,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    "llama": {"num_key_value_heads": 2},
    "mimo": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 64, "max_window_layers": 2},
    "qwen2": {"num_key_value_heads": 2, "sliding_window": 64, "use_sliding_window": False, "max_window_layers": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8, "max_window_layers": 2},
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""At theta 100 some channels turn slowly, some fast, and some in between."""
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4,
    "beta_slow": 1,
}
FEATURES: Mapping[str, dict[str, Any]] = {
    "groups": {"n_group": 4, "topk_group": 2},
    "one_expert_a_group": {"n_group": 8, "topk_group": 3},
    "five_of_six": {"n_routed_experts": 6, "num_experts_per_tok": 5},
    "softmax": {"scoring_func": "softmax"},
    "not_normalised": {"norm_topk_prob": False, "routed_scaling_factor": 1.7},
    "two_shared": {"n_shared_experts": 2},
    "no_shared": {"n_shared_experts": 0},
    "every_other_layer": {"moe_layer_freq": 2, "first_k_dense_replace": 0, "num_hidden_layers": 4},
    "all_dense": {"n_routed_experts": None},
    "one_layer": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "three_mtp": {"num_nextn_predict_layers": 3},
    "no_mtp": {"num_nextn_predict_layers": 0},
    "tied": {"tie_word_embeddings": True},
    "other_eps": {"rms_norm_eps": 1e-2},
    "no_q_lora": {"q_lora_rank": None},
    "bias": {"attention_bias": True},
    "no_bias": {"attention_bias": False},
    "halves": {"rope_interleave": False},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "yarn": {"rope_scaling": _YARN},
    "yarn_mscale": {"rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "yarn_two_mscales": {"rope_scaling": _YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "yarn_new_layout": {"rope_parameters": _YARN | {"rope_theta": 50.0}, "rope_theta": None},
    "llama3": {"rope_scaling": _LLAMA3},
    "one_kv_head": {"num_key_value_heads": 1},
    "all_kv_heads": {"num_key_value_heads": 4},
    "derived_head_dim": {"head_dim": None},
    "qk_norm": {"use_qk_norm": True},
    "all_channels_rotate": {"partial_rotary_factor": 1.0},
    "quarter_new_layout": {
        "rope_theta": None,
        "partial_rotary_factor": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.25},
    },
}
SHAPES = (
    ("deepseek_v3", "no_q_lora", "halves", "two_shared", "no_mtp"),
    ("deepseek_v3", "bias", "yarn_mscale", "three_mtp", "groups"),
    ("deepseek_v3", "yarn_two_mscales", "no_q_lora", "bias", "not_normalised"),
    ("deepseek_v3", "yarn_new_layout", "no_shared", "tied"),
    ("deepseek_v3", "linear", "softmax", "one_expert_a_group"),
    ("deepseek_v3", "every_other_layer", "five_of_six"),
    ("deepseek_v3", "all_dense", "other_eps"),
    ("deepseek_v3", "one_layer", "yarn"),
    ("glm4_moe", "one_kv_head", "qk_norm", "three_mtp"),
    ("glm4_moe", "all_kv_heads", "no_bias", "derived_head_dim", "tied"),
    ("glm4_moe", "yarn", "two_shared", "not_normalised"),
    ("glm4_moe", "quarter_new_layout", "groups", "no_mtp"),
    ("glm4_moe", "all_channels_rotate", "no_shared", "one_layer"),
    ("glm4_moe", "other_eps", "qk_norm", "no_bias", "five_of_six"),
    ("llama", "llama3", "no_mtp", "tied"),
    ("llama", "bias", "all_kv_heads", "linear"),
    ("llama", "one_kv_head", "other_eps", "yarn", "three_mtp"),
    ("mimo", "three_mtp", "one_kv_head"),
    ("qwen2", "yarn", "all_kv_heads", "tied"),
    ("qwen3", "no_mtp", "bias"),
    ("qwen3", "tied", "one_kv_head", "other_eps"),
)


def config_of(model_type: str, *features: str, **changes: Any) -> dict[str, Any]:
    """The `config.json` of a shape. Null fields are left out, but for those in which null says something."""
    config: dict[str, Any] = {"model_type": model_type, **_COMMON, **_BASES[model_type]}
    for feature in features:
        config |= FEATURES[feature]
    config |= changes
    return {name: value for name, value in config.items() if value is not None or name == "q_lora_rank"}


def shape_id(shape: tuple[str, ...]) -> str:
    return "-".join(shape)
