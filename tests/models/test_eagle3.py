"""Eagle3 drafters: features and logits at every depth against a plain computation; what a config may say."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jaxtyping import Array

from mtp_jax.core.errors import ConfigError
from mtp_jax.models.api import Weights
from mtp_jax.models.eagle3 import eagle3_drafter
from mtp_jax.models.sharding import weight_specs
from mtp_jax.models.with_drafter import WithDrafter
from mtp_jax.ops.placement import AxisRules
from mtp_jax.ops.sampling import over_target_vocab
from mtp_jax.ops.sharding import NO_PARALLEL, Parallel
from tests.models.support import DenseAttend, as_row, assert_logits_close, dense_kv, positions_of
from tests.models.tiny_eagle3 import DRAFTER_CONFIG, TAPS, VOCAB_SIZE, target_family, tiny_eagle3

KNOWN, NUM_DRAFTS = 12, 3
VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "normed before the residual": {"norm_before_residual": True, "attention_bias": True},
    "narrower, with its own embedding": {
        "has_embedding": True,
        "hidden_size": 12,
        "head_dim": 6,
        "target_hidden_size": 16,
    },
    "the target's vocabulary": {"draft_vocab_size": None},
}


@partial(jax.jit, static_argnums=0)
def logits_by_depth(family: WithDrafter, weights: Weights, known_BX: Array, drafts_BK: Array) -> Array:
    """[K + 1, V]: what the drafter says after `known` and the first k drafts."""
    num_rows = known_BX.shape[1] - 1
    positions = positions_of(num_rows)
    kv = dense_kv(family.kv_specs(), 1, num_rows)
    _, features, _ = family.forward_with_features(weights, known_BX[:, :-1], positions, kv, DenseAttend(positions))
    (layer_kv,) = dense_kv(family.draft_kv_specs(), 1, num_rows + drafts_BK.shape[1])
    head, hidden, layer_kv = family.draft_forward(
        weights, 0, known_BX[:, 1:], features, positions, layer_kv, DenseAttend(positions)
    )
    heads = [head[:, -1:]]
    for j in range(drafts_BK.shape[1]):
        at = positions_of(1, num_rows + j)
        head, hidden, layer_kv = family.draft_forward(
            weights, 0, drafts_BK[:, j : j + 1], hidden[:, -1:], at, layer_kv, DenseAttend(at)
        )
        heads.append(head)
    logits = family.draft_unembed(weights, 0, jnp.concatenate(heads, axis=1))
    ids = family.draft_ids(weights)
    return (logits if ids is None else over_target_vocab(logits, ids, family.vocab_size))[0]


@pytest.mark.parametrize("name", VARIANTS)
def test_b113_every_depth_equals_a_draft_made_from_scratch(name: str) -> None:
    family = tiny_eagle3(**VARIANTS[name])
    config = {key: value for key, value in VARIANTS[name].items() if key != "has_embedding"}
    reference = family.reference(DRAFTER_CONFIG | config)
    rng = np.random.default_rng(3)
    known, drafts = rng.integers(0, VOCAB_SIZE, KNOWN), rng.integers(0, VOCAB_SIZE, NUM_DRAFTS)
    weights = family.init_weights(jax.random.key(0), None)
    actual = np.asarray(logits_by_depth(family, weights, as_row(known), as_row(drafts)))
    for depth in range(NUM_DRAFTS + 1):
        expected = reference.draft_logits(known.tolist(), drafts[:depth].tolist())
        is_there = np.isfinite(expected)
        assert np.array_equal(np.isfinite(actual[depth]), is_there)
        assert_logits_close(actual[depth][is_there], expected[is_there], 5e-5)


def features_and_draft(
    family: WithDrafter, parallel: Parallel, weights: Weights, tokens: Array, positions: Array, kv: Any, draft_kv: Any
) -> tuple[Any, ...]:
    attend = DenseAttend(positions)
    _, features, _ = family.forward_with_features(weights, tokens, positions, kv, attend, parallel)
    head, hidden, layer_kv = family.draft_forward(
        weights, 0, tokens, features, positions, draft_kv[0], attend, parallel
    )
    return features, hidden, family.draft_unembed(weights, 0, parallel.gather_slots(head), parallel), layer_kv


@pytest.mark.parametrize("has_embedding", [False, True])
def test_a_mesh_gives_the_single_device_result(has_embedding: bool) -> None:
    family, num_slots, width = tiny_eagle3(has_embedding=has_embedding), 4, 3
    parallel = Parallel(data="data", model="model")
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    rules = AxisRules(parallel)
    slots, heads = rules.spec("slots"), rules.spec("slots", None, "kv_heads")
    kv_specs = (heads,) * len(family.kv_specs())
    inputs = (
        family.init_weights(jax.random.key(0), None),
        jax.random.randint(jax.random.key(1), (num_slots, width), 0, VOCAB_SIZE),
        jnp.repeat(positions_of(width), num_slots, axis=0),
        dense_kv(family.kv_specs(), num_slots, width),
        dense_kv(family.draft_kv_specs(), num_slots, width),
    )
    on_mesh = jax.shard_map(
        partial(features_and_draft, family, parallel),
        mesh=mesh,
        in_specs=(weight_specs(family, rules), slots, slots, kv_specs, (heads,)),
        out_specs=(slots, slots, rules.spec(None, None, "vocab"), heads),
    )
    expected = jax.jit(partial(features_and_draft, family, NO_PARALLEL))(*inputs)
    for split, whole in zip(jax.tree.leaves(jax.jit(on_mesh)(*inputs)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(split, whole, rtol=2e-5, atol=5e-5)


def drafter_of(names: tuple[str, ...] = (), num_layers: int = 3, **changes: Any) -> Any:
    config = {key: value for key, value in (DRAFTER_CONFIG | changes).items() if value is not ...}
    return eagle3_drafter(config, names, replace(target_family(), num_layers=num_layers))


@pytest.mark.parametrize(
    ("listed", "num_layers", "taps"),
    [
        ({"eagle_config": ...}, 32, (2, 16, 29)),
        ({"eagle_config": ...}, 7, (2, 3, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, 61, (2, 30, 58)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, 32, (2, 16, 29)),
        ({"eagle_config": ..., "eagle_aux_hidden_state_layer_ids": [1, 46, 90]}, 94, (2, 47, 91)),
        ({"eagle_config": ..., "eagle_aux_hidden_state_layer_ids": [2, 16, 32]}, 32, (2, 16, 32)),
        ({}, 2, TAPS),
    ],
)
def test_layers_are_counted_by_what_enters_them(listed: dict[str, Any], num_layers: int, taps: tuple[int, ...]) -> None:
    assert drafter_of(num_layers=num_layers, **listed).taps == taps


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"vocab_size": 32, "draft_vocab_size": 16},
            "'vocab_size' is 32; it must be 24, the llama target's vocabulary",
        ),
        ({"hidden_size": 32}, "'hidden_size' is 32; it must be 16, the llama target's hidden size"),
        ({"target_hidden_size": 8}, "'target_hidden_size' is 8; it must be 16"),
        ({"hidden_size": 8, "target_hidden_size": 16}, "'hidden_size' is 8; .*no 'embed_tokens.weight' of its own"),
        ({"draft_vocab_size": 25}, "'draft_vocab_size' is 25; it must be at most vocab_size=24"),
        ({"num_hidden_layers": 2}, "'num_hidden_layers' is 2; Eagle3 drafters have 1"),
        ({"tie_word_embeddings": True}, "'tie_word_embeddings' is true"),
        ({"eagle_config": ...}, "the target has 3 layers, too few"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"eagle_config": ..., "eagle_aux_hidden_state_layer_ids": [2, 2, 3]}, "must ascend within the target's 3"),
        ({"eagle_config": ..., "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "must ascend within the target's 3"),
        ({"eagle_config": ..., "eagle_aux_hidden_state_layer_ids": "low"}, "it must be a list of layers"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, "give one"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"norm_before_fc": True}, "'norm_before_fc' is True"),
        ({"use_sliding_window": True, "max_window_layers": 0}, "sliding window"),
        ({"bias": True}, "'bias' is True"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        drafter_of(**changes)
    assert str(refused.value).endswith(".")
