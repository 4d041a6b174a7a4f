"""Shapes other than the goldens': the families against a plain float64 computation of the same configs."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jaxtyping import Array

from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.models.registry import family_from_config
from tests.models.reference import Reference
from tests.models.shapes import SHAPES, config_of, shape_id
from tests.models.support import (
    DenseAttend,
    as_row,
    assert_logits_close,
    dense_kv,
    pack_weights,
    positions_of,
    random_checkpoint,
)

LENGTH = 24


@partial(jax.jit, static_argnums=0)
def everything(family: ModelFamily, weights: Weights, tokens_BX: Array) -> list[tuple[Array, Array]]:
    """(logits, hidden) of the target, then (logits, recycled hidden) of each MTP layer in a chain."""
    positions = positions_of(LENGTH)
    attend = DenseAttend(positions)
    hidden, _ = family.forward(
        weights, tokens_BX[:, :LENGTH], positions, dense_kv(family.kv_specs(), 1, LENGTH), attend
    )
    results = [(family.unembed(weights, hidden), hidden)]
    for depth, layer_kv in enumerate(dense_kv(family.draft_kv_specs(), 1, LENGTH)):
        tokens = tokens_BX[:, 1 + depth : 1 + depth + LENGTH]
        head, hidden, _ = family.draft_forward(weights, depth, tokens, hidden, positions, layer_kv, attend)
        results.append((family.draft_unembed(weights, depth, head), hidden))
    return results


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_target_and_mtp_layers(shape: tuple[str, ...]) -> None:
    config = config_of(*shape)
    family = family_from_config(config)
    arrays = random_checkpoint(family.tensors(), seed=0)
    tokens = np.random.default_rng(1).integers(0, family.vocab_size, LENGTH + 4)
    actual = everything(family, pack_weights(family.tensors(), arrays), as_row(tokens))

    reference = Reference(config, arrays)
    hidden = reference.hidden(tokens[:LENGTH])
    expected: list[tuple[Any, Any]] = [(reference.logits(hidden), hidden)]
    for depth in range(config["num_nextn_predict_layers"]):
        logits, hidden = reference.draft(depth, tokens[1 + depth : 1 + depth + LENGTH], hidden)
        expected.append((logits, hidden))
    for of_actual, of_expected in zip(actual, expected, strict=True):
        assert_logits_close(of_actual[0][0], of_expected[0], 5e-5)
        assert_logits_close(of_actual[1][0], of_expected[1], 5e-5)
