"""What every family of the table must satisfy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.models.registry import FAMILIES, family_from_config
from tests.models.shapes import config_of
from tests.models.support import (
    Golden,
    as_row,
    dense_kv,
    pack_weights,
    positions_of,
    random_checkpoint,
    run_draft,
    run_target,
    unpack_weights,
)

NUM_TOKENS = 6


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> ModelFamily:
    return family_from_config(config_of(request.param, num_hidden_layers=2))


@pytest.fixture(scope="module")
def weights(family: ModelFamily) -> Weights:
    return pack_weights(family.tensors(), random_checkpoint(family.tensors(), seed=3))


def test_families_are_frozen_and_hashable(family: ModelFamily) -> None:
    again = family_from_config(config_of(family.name, num_hidden_layers=2))
    assert family == again
    assert hash(family) == hash(again)
    assert isinstance(family, ModelFamily)


def test_wide_rows_equal_single_rows(family: ModelFamily, weights: Weights) -> None:
    tokens = np.arange(NUM_TOKENS) * 7 % family.vocab_size
    wide_hidden, wide_logits, wide_kv = run_target(
        family, weights, as_row(tokens), positions_of(NUM_TOKENS), dense_kv(family.kv_specs(), 1, NUM_TOKENS)
    )
    (draft_kv,) = dense_kv(family.draft_kv_specs(), 1, NUM_TOKENS)
    wide_recycled, wide_draft_logits, _ = run_draft(
        family, weights, 0, as_row(tokens), wide_hidden, positions_of(NUM_TOKENS), draft_kv
    )
    kv = dense_kv(family.kv_specs(), 1, NUM_TOKENS)
    for position, token in enumerate(tokens):
        at = positions_of(1, position)
        hidden, logits, kv = run_target(family, weights, as_row(token), at, kv)
        recycled, draft_logits, draft_kv = run_draft(family, weights, 0, as_row(token), hidden, at, draft_kv)
        for single, wide in (
            (hidden, wide_hidden),
            (logits, wide_logits),
            (recycled, wide_recycled),
            (draft_logits, wide_draft_logits),
        ):
            np.testing.assert_allclose(single[:, 0], wide[:, position], rtol=2e-5, atol=2e-5)
    for single_layer, wide_layer in zip(jax.tree.leaves(kv), jax.tree.leaves(wide_kv), strict=True):
        np.testing.assert_allclose(single_layer, wide_layer, rtol=2e-5, atol=2e-5)


def test_a_nan_slot_stays_alone(family: ModelFamily, weights: Weights) -> None:
    hidden = jax.random.normal(jax.random.key(0), (3, 2, family.hidden_size))
    tokens, positions = jnp.ones((3, 2), jnp.int32), jnp.repeat(positions_of(2), 3, axis=0)

    def run(hidden_BWD: jax.Array) -> tuple[jax.Array, jax.Array]:
        (kv,) = dense_kv(family.draft_kv_specs(), 3, 2)
        recycled, logits, _ = run_draft(family, weights, 0, tokens, hidden_BWD, positions, kv)
        return recycled, logits

    for clean, dirty in zip(run(hidden), run(hidden.at[1].set(jnp.nan)), strict=True):
        np.testing.assert_array_equal(dirty[jnp.array([0, 2])], clean[jnp.array([0, 2])])


def test_hidden_states_are_normalised_with_the_plain_weight(family: ModelFamily, weights: Weights) -> None:
    changed = dict(weights) | {"norm": {"weight": jnp.full((family.hidden_size,), 3.0)}}
    kv = dense_kv(family.kv_specs(), 1, NUM_TOKENS)
    hidden, _, _ = run_target(family, changed, as_row(np.arange(NUM_TOKENS)), positions_of(NUM_TOKENS), kv)
    np.testing.assert_allclose(jnp.mean(hidden**2, axis=-1), 9.0, rtol=1e-3)


def test_packing_is_exactly_invertible(family: ModelFamily) -> None:
    arrays = random_checkpoint(family.tensors(), seed=4)
    weights = pack_weights(family.tensors(), arrays)
    back = unpack_weights(family.tensors(), weights)
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)


def test_declared_shapes_and_axes_are_those_of_the_packed_arrays(family: ModelFamily) -> None:
    arrays = random_checkpoint(family.tensors(), seed=4)
    for tensor in family.tensors():
        packed = tensor.pack([arrays[name] for name in tensor.sources])
        assert packed.shape == tensor.shape
        assert len(tensor.axes) == len(tensor.shape)
        assert tuple(arrays[name].shape for name in tensor.sources) == tensor.source_shapes
    paths = [tensor.path for tensor in family.tensors()]
    assert len(set(paths)) == len(paths)
    sources = [name for tensor in family.tensors() for name in tensor.sources]
    assert len(set(sources)) == len(sources)


@pytest.mark.parametrize("name", ["deepseek_v3_tiny", "deepseek_v3_mtp2_tiny", "glm4_moe_tiny"])
def test_every_checkpoint_tensor_is_used_once_or_a_copy(name: str) -> None:
    golden = Golden.load(name)
    sources = {source for tensor in golden.family.tensors() for source in tensor.sources}
    duplicates = golden.family.duplicates()
    assert sources.isdisjoint(duplicates)
    assert golden.tensor_names == sources | duplicates.keys()
    assert set(duplicates.values()) <= sources


def test_initial_weights_fill_exactly_the_declared_leaves(family: ModelFamily) -> None:
    weights = jax.eval_shape(lambda key: family.init_weights(key, jnp.bfloat16), jax.random.key(0))
    found = {
        tuple(part.key for part in path): (leaf.shape, leaf.dtype)
        for path, leaf in jax.tree_util.tree_leaves_with_path(weights)
    }
    assert found == {tensor.path: (tensor.shape, jnp.dtype(tensor.dtype or "bfloat16")) for tensor in family.tensors()}


def test_every_weight_matters(family: ModelFamily, weights: Weights) -> None:
    tokens, positions = as_row(np.arange(NUM_TOKENS)), positions_of(NUM_TOKENS)

    def total(weights: Weights) -> jax.Array:
        hidden, logits, _ = run_target(family, weights, tokens, positions, dense_kv(family.kv_specs(), 1, NUM_TOKENS))
        (kv,) = dense_kv(family.draft_kv_specs(), 1, NUM_TOKENS)
        _, draft_logits, _ = run_draft(family, weights, 0, tokens, hidden, positions, kv)
        return jnp.sum(jnp.sin(logits)) + jnp.sum(jnp.sin(draft_logits))

    for path, gradient in jax.tree_util.tree_leaves_with_path(jax.grad(total)(weights)):
        if path[-1].key == "correction_bias":  # chooses experts, weighs nothing
            assert not gradient.any()
        else:
            assert jnp.isfinite(gradient).all()
            assert jnp.abs(gradient).max() > 1e-6, path
