"""The models of the suite: their sizes are those of real ones, their weights random and made on the device."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mtp_jax.models.api import Weights
from mtp_jax.models.decoder import MtpDecoder
from mtp_jax.models.params import put
from mtp_jax.models.registry import family_from_config


@dataclass(frozen=True)
class SuiteModel:
    """A model to measure, and how: prompts of `context` tokens, drafts among `draft_vocab_size` tokens on a shortlist.

    `config` is in Hugging Face's form: transformers builds the same model from it.
    """

    name: str
    config: Mapping[str, Any]
    context: int
    prefill_chunk: int
    page_size: int
    draft_vocab_size: int

    def family(self) -> MtpDecoder:
        """Its family."""
        family = family_from_config(self.config)
        assert isinstance(family, MtpDecoder)
        return family


_DENSE = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
}
_MOE = {
    "model_type": "deepseek_v3",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 102400,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
}
_TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
}
_TINY_EXPERTS = {"moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
_TINY_LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}

DENSE = SuiteModel("dense-1.24b", _DENSE, context=896, prefill_chunk=64, page_size=64, draft_vocab_size=16384)
MOE = SuiteModel("moe-mla-16b", _MOE, context=896, prefill_chunk=64, page_size=64, draft_vocab_size=16384)
TINY_DENSE = SuiteModel(
    "dense-tiny", {**_DENSE, **_TINY, "num_key_value_heads": 2, "head_dim": 8}, 16, 8, page_size=8, draft_vocab_size=64
)
TINY_MOE = SuiteModel(
    "moe-mla-tiny", {**_MOE, **_TINY, **_TINY_EXPERTS, **_TINY_LATENT}, 16, 8, page_size=8, draft_vocab_size=64
)


def random_weights(family: MtpDecoder, dtype: Any) -> Weights:
    """Normal matrices of the family's `initializer_range`, ones for norms: on the device, a program for each shape."""
    make = jax.jit(_matrix, static_argnums=(1, 3))
    tree: dict[str, Any] = {}
    for index, spec in enumerate(family.tensors()):
        array_dtype = spec.dtype or dtype
        if len(spec.shape) == 1:
            array = jnp.full(spec.shape, 0.0 if spec.dtype else 1.0, array_dtype)
        else:
            array = make(jax.random.key(index), spec.shape, family.initializer_range, jnp.dtype(array_dtype))
        put(tree, spec.path, array)
    return tree


def _matrix(key: jax.Array, shape: tuple[int, ...], std: float, dtype: Any) -> jax.Array:
    return (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
