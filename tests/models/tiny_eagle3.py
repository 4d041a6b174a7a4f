"""A tiny Llama target and Eagle3 drafters for it, their weights functions of their names; and the same in numpy."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Array

from mtp_jax.models.api import NamedTensors, TappedFamily, Weights
from mtp_jax.models.decoder import MtpDecoder
from mtp_jax.models.eagle3 import TOKEN_MAP, eagle3_drafter
from mtp_jax.models.registry import family_from_config
from mtp_jax.models.with_drafter import WithDrafter
from tests.models.dense_goldens import tensor_of
from tests.models.reference import Eagle3Reference, Reference
from tests.models.support import pack_weights

VOCAB_SIZE, DRAFT_VOCAB_SIZE = 24, 16
TARGET_CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
}
DRAFTER_CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": DRAFT_VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "max_window_layers": 48,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50.0,
    "tie_word_embeddings": False,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
}
TAPS = (0, 1, 2)
HEAD_SCALE = 0.5
"""Flat laws: two random models agree often enough under the noise they share."""


def token_ids(draft_vocab_size: int = DRAFT_VOCAB_SIZE) -> np.ndarray:
    """The target's token of each draft id: two of three, ascending, and not the first ones."""
    ids = [token for token in range(VOCAB_SIZE) if token % 3 != 0]
    return np.array(ids[:draft_vocab_size])


def tensors_of(named: NamedTensors, prefix: str) -> dict[str, np.ndarray]:
    """A checkpoint; `prefix` makes weights of one name differ between models."""
    arrays = {}
    for spec in named.tensors():
        for name, shape in zip(spec.sources, spec.source_shapes, strict=True):
            scale = HEAD_SCALE if name.endswith("lm_head.weight") else 1.0
            arrays[name] = (scale * tensor_of(prefix + name, shape)).astype(np.float32)
            if name == TOKEN_MAP:
                arrays[name] = token_ids(shape[0]) - np.arange(shape[0])
    return arrays


def target_family() -> MtpDecoder:
    family = family_from_config(TARGET_CONFIG)
    assert isinstance(family, MtpDecoder)
    return family


@dataclass(frozen=True)
class TinyEagle3(WithDrafter):
    """Target and drafter whose `init_weights` are always the same."""

    def init_weights(self, key: Array, dtype: Any) -> Weights:
        target = pack_weights(self.target.tensors(), tensors_of(self.target, "target."))
        own = tensors_of(self.drafter, "drafter.")
        if TOKEN_MAP in own:
            own[TOKEN_MAP] = own[TOKEN_MAP].astype(np.int32)
        return self.join(target, pack_weights(self.drafter.tensors(), own))

    def reference(self, drafter_config: dict[str, Any]) -> Eagle3Reference:
        target = Reference(TARGET_CONFIG, tensors_of(self.target, "target."))
        return Eagle3Reference(drafter_config, tensors_of(self.drafter, "drafter."), target, self.drafter.taps)


@functools.cache
def tiny_eagle3(*, has_embedding: bool = False, **changes: Any) -> TinyEagle3:
    target = target_family()
    assert isinstance(target, TappedFamily)
    names = {"embed_tokens.weight"} if has_embedding else set()
    return TinyEagle3(target, eagle3_drafter(DRAFTER_CONFIG | changes, names, target))
