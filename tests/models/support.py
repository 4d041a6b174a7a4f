"""What the family tests share: a dense cache that satisfies `Attend`, golden checkpoints, plain and draft decoding."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from safetensors.numpy import load_file

from mtp_jax.core.types import KVSpec, LayerKV
from mtp_jax.models.api import ModelFamily, TensorSpec, Weights
from mtp_jax.models.params import get, put
from mtp_jax.models.registry import family_from_config

GOLDENS = Path(__file__).parents[1] / "goldens"
GOLDEN_NAMES = ("deepseek_v3_tiny", "deepseek_v3_mtp2_tiny", "glm4_moe_tiny")


@dataclass(frozen=True)
class DenseAttend:
    """Attention over a dense cache [B, S, G, C]: rows go to their positions and see every position up to their own."""

    positions_BW: Array

    def __call__(
        self, layer_kv: LayerKV, q_BWHC: Array, k_BWGC: Array, v_BWGE: Array | None, *, scale: float, v_channels: int
    ) -> tuple[Array, LayerKV]:
        slot = jnp.arange(q_BWHC.shape[0])[:, None]
        keys = layer_kv.k_pages.at[slot, self.positions_BW].set(k_BWGC)
        values = keys[..., :v_channels]
        if v_BWGE is not None:
            assert layer_kv.v_pages is not None
            values = layer_kv.v_pages.at[slot, self.positions_BW].set(v_BWGE)
        num_slots, width, num_heads, channels = q_BWHC.shape
        q_BWGJC = q_BWHC.reshape(num_slots, width, keys.shape[2], -1, channels)
        scores = scale * jnp.einsum("bwgjc,bsgc->bgjws", q_BWGJC, keys, preferred_element_type=jnp.float32)
        is_seen_BWS = jnp.arange(keys.shape[1])[None, None, :] <= self.positions_BW[:, :, None]
        probs = jax.nn.softmax(jnp.where(is_seen_BWS[:, None, None], scores, -jnp.inf), axis=-1)
        out = jnp.einsum("bgjws,bsge->bwgje", probs.astype(values.dtype), values)
        kept = LayerKV(k_pages=keys, v_pages=None if v_BWGE is None else values)
        return out.reshape(num_slots, width, num_heads, v_channels), kept


def dense_kv(specs: tuple[KVSpec, ...], num_slots: int, length: int, dtype: Any = jnp.float32) -> tuple[LayerKV, ...]:
    """Empty dense caches."""

    def zeros(num_channels: int, spec: KVSpec) -> Array:
        return jnp.zeros((num_slots, length, spec.num_kv_heads, num_channels), dtype)

    return tuple(
        LayerKV(zeros(spec.k_channels, spec), None if spec.v_channels is None else zeros(spec.v_channels, spec))
        for spec in specs
    )


def pack_weights(tensors: tuple[TensorSpec, ...], arrays: Mapping[str, np.ndarray]) -> Weights:
    """The weight pytree from a checkpoint's tensors."""
    weights: dict[str, Any] = {}
    for tensor in tensors:
        put(weights, tensor.path, jnp.asarray(tensor.pack([arrays[source] for source in tensor.sources])))
    return weights


def unpack_weights(tensors: tuple[TensorSpec, ...], weights: Weights) -> dict[str, np.ndarray]:
    """A checkpoint's tensors from the weight pytree."""
    arrays: dict[str, np.ndarray] = {}
    for tensor in tensors:
        arrays.update(zip(tensor.sources, tensor.unpack(np.asarray(get(weights, tensor.path))), strict=True))
    return arrays


@dataclass(frozen=True)
class Golden:
    family: ModelFamily
    weights: Weights
    tensor_names: frozenset[str]
    expected: Mapping[str, np.ndarray]

    @classmethod
    def load(cls, name: str) -> "Golden":
        folder = GOLDENS / name
        arrays = load_file(folder / "model.safetensors")
        family = family_from_config(json.loads((folder / "config.json").read_text()), arrays.keys())
        weights = pack_weights(family.tensors(), arrays)
        return cls(family, weights, frozenset(arrays), dict(np.load(folder / "expected.npz")))


def assert_logits_close(actual: Any, expected: Any, tolerance: float = 2e-4) -> None:
    """Within `tolerance` of the largest absolute logit: float32 sums in another order differ by about 1e-6 of it."""
    limit = tolerance * np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=0, atol=limit)


@partial(jax.jit, static_argnums=0)
def run_target(
    family: ModelFamily, weights: Weights, tokens_BW: Array, positions_BW: Array, kv: Any
) -> tuple[Array, Array, Any]:
    """(hidden, logits, kv) of these rows."""
    hidden_BWD, kv = family.forward(weights, tokens_BW, positions_BW, kv, DenseAttend(positions_BW))
    return hidden_BWD, family.unembed(weights, hidden_BWD), kv


@partial(jax.jit, static_argnums=(0, 2))
def run_draft(
    family: ModelFamily, weights: Weights, depth: int, tokens_BW: Array, hidden_BWD: Array, positions_BW: Array, kv: Any
) -> tuple[Array, Array, Any]:
    """(recycled hidden, draft logits, kv) of these rows through MTP layer `depth`."""
    head, recycled, kv = family.draft_forward(
        weights, depth, tokens_BW, hidden_BWD, positions_BW, kv, DenseAttend(positions_BW)
    )
    return recycled, family.draft_unembed(weights, depth, head), kv


def as_row(tokens: Any) -> Array:
    return jnp.asarray(tokens, jnp.int32).reshape(1, -1)


def positions_of(length: int, start: int = 0) -> Array:
    return start + jnp.arange(length, dtype=jnp.int32)[None, :]


def random_checkpoint(tensors: tuple[TensorSpec, ...], seed: int) -> dict[str, np.ndarray]:
    """Random tensors by checkpoint name: norm weights near one but not one, biases away from zero."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for tensor in tensors:
        for name, shape in zip(tensor.sources, tensor.source_shapes, strict=True):
            values = rng.standard_normal(shape)
            is_norm = len(shape) == 1 and not name.endswith("bias")
            arrays[name] = (1 + 0.3 * values if is_norm else 0.3 * values).astype(np.float32)
    return arrays
