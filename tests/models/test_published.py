"""Published configs, full size: read, and as many parameters as the model cards say; nothing is allocated."""

from math import prod
from typing import Any

import pytest

from mtp_jax.models.decoder import MtpDecoder
from mtp_jax.models.eagle3 import eagle3_drafter
from mtp_jax.models.registry import family_from_config

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}
QWEN2_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-3.1-8B-Instruct": (LLAMA_8B, 8_030_261_248),
    "Llama-3.2-1B": (
        LLAMA_8B
        | {
            "head_dim": 64,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "rope_scaling": LLAMA3 | {"factor": 32.0},
            "tie_word_embeddings": True,
        },
        1_235_814_400,
    ),
    "SmolLM2-135M-Instruct": (
        LLAMA_8B
        | {
            "eos_token_id": 2,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
            "vocab_size": 49152,
        },
        134_515_008,
    ),
    "Qwen2.5-7B-Instruct": (QWEN2_7B, 7_615_616_512),
    "Qwen3-8B": (
        QWEN2_7B
        | {
            "attention_bias": False,
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_position_embeddings": 40960,
            "max_window_layers": 36,
            "model_type": "qwen3",
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "rope_scaling": None,
            "sliding_window": None,
            "vocab_size": 151936,
        },
        8_190_735_360,
    ),
    "MiMo-7B-RL": (
        QWEN2_7B
        | {
            "attention_bias": True,
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "model_type": "mimo",
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 640000,
            "sliding_window": 32768,
            "use_mrope": False,
            "vocab_size": 151680,
        },
        7_833_409_536,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_has_as_many_parameters_as_its_card_says(name: str) -> None:
    config, num_parameters = PUBLISHED[name]
    assert sum(prod(spec.shape) for spec in family_from_config(config).tensors()) == num_parameters


def test_the_published_drafter_of_llama_8b() -> None:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "bos_token_id": 128000,
        "draft_vocab_size": 32000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 1,
        "num_key_value_heads": 8,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "use_cache": True,
        "vocab_size": 128256,
    }
    target = family_from_config(LLAMA_8B)
    assert isinstance(target, MtpDecoder)
    drafter = eagle3_drafter(config, (), target)
    shapes = {
        name: shape for spec in drafter.tensors() for name, shape in zip(spec.sources, spec.source_shapes, strict=True)
    }
    assert drafter.taps == (2, 16, 29)
    assert shapes == {
        "d2t": (32000,),
        "fc.weight": (4096, 12288),
        "lm_head.weight": (32000, 4096),
        "midlayer.hidden_norm.weight": (4096,),
        "midlayer.input_layernorm.weight": (4096,),
        "midlayer.mlp.down_proj.weight": (4096, 14336),
        "midlayer.mlp.gate_proj.weight": (14336, 4096),
        "midlayer.mlp.up_proj.weight": (14336, 4096),
        "midlayer.post_attention_layernorm.weight": (4096,),
        "midlayer.self_attn.k_proj.weight": (1024, 8192),
        "midlayer.self_attn.o_proj.weight": (4096, 4096),
        "midlayer.self_attn.q_proj.weight": (4096, 8192),
        "midlayer.self_attn.v_proj.weight": (1024, 8192),
        "norm.weight": (4096,),
    }
