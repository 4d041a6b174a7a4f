"""Tiny dense models that need no file of weights: each weight is an exact function of its tensor's name and its index.

Knows neither jax nor torch, so that the recorder and the tests make the same models.
"""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

EXPECTED = Path(__file__).parents[1] / "goldens" / "dense_expected.npz"
PROMPT_LEN, NUM_GREEDY, NUM_ROWS = 24, 20, 6
"""Logits are recorded of the last `NUM_ROWS` rows of the prompt."""
_COMMON = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama": _COMMON | {"model_type": "llama", "rope_theta": 10000.0},
    "llama3": _COMMON | {"model_type": "llama", "rope_theta": 100.0, "rope_scaling": _LLAMA3, "attention_bias": True},
    "smollm2": _COMMON | {"model_type": "llama", "rope_theta": 100000.0, "tie_word_embeddings": True},
    "qwen2": _COMMON
    | {"model_type": "qwen2", "rope_theta": 1000.0, "tie_word_embeddings": True, "use_sliding_window": False},
    "qwen3": _COMMON | {"model_type": "qwen3", "rope_theta": 1000.0, "head_dim": 8},
    "mimo": _COMMON | {"model_type": "mimo", "rope_theta": 640.0, "head_dim": 4, "num_nextn_predict_layers": 1},
}


def prompt_of(name: str) -> np.ndarray:
    """The prompt of a model, int32 [PROMPT_LEN]."""
    return (_mixed(f"prompt of {name}", PROMPT_LEN) % np.uint64(_COMMON["vocab_size"])).astype(np.int32)


def tensor_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A checkpoint tensor, float32: norm weights near one but not one, everything else spread around zero."""
    spread = (_mixed(name, int(np.prod(shape))) >> np.uint64(40)).astype(np.float64) / 2**23 - 1  # in [-1, 1)
    is_norm = len(shape) == 1 and not name.endswith("bias")
    return (1 + 0.4 * spread if is_norm else 0.5 * spread).astype(np.float32).reshape(shape)


def _mixed(name: str, count: int) -> np.ndarray:
    """Splitmix64 of (name, index): the same 64 bits wherever numpy runs."""
    with np.errstate(over="ignore"):
        x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64(zlib.crc32(name.encode())) << np.uint64(32)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        return x ^ (x >> np.uint64(31))
