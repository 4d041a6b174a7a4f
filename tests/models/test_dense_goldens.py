"""Llama, Qwen and MiMo models against what Hugging Face transformers computed for the same weights."""

from functools import partial

import jax
import numpy as np
import pytest
from jaxtyping import Array

from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.models.registry import family_from_config
from tests.models.dense_goldens import CONFIGS, EXPECTED, NUM_GREEDY, NUM_ROWS, PROMPT_LEN, prompt_of, tensor_of
from tests.models.support import DenseAttend, as_row, assert_logits_close, dense_kv, pack_weights, positions_of

pytestmark = pytest.mark.parity
LENGTH = PROMPT_LEN + NUM_GREEDY


@partial(jax.jit, static_argnums=0)
def target_and_mtp(family: ModelFamily, weights: Weights, tokens_BX: Array) -> list[Array]:
    """Logits of the target's rows and, where there is an MTP layer, of its rows, which look one token ahead."""
    rows, positions = tokens_BX[:, :LENGTH], positions_of(LENGTH)
    attend = DenseAttend(positions)
    hidden, _ = family.forward(weights, rows, positions, dense_kv(family.kv_specs(), 1, LENGTH), attend)
    logits = [family.unembed(weights, hidden)]
    for depth, layer_kv in enumerate(dense_kv(family.draft_kv_specs(), 1, LENGTH)):
        head, _, _ = family.draft_forward(weights, depth, tokens_BX[:, 1:], hidden, positions, layer_kv, attend)
        logits.append(family.draft_unembed(weights, depth, head))
    return logits


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str) -> None:
    with np.load(EXPECTED) as expected:
        greedy, logits = expected[f"{name}/greedy"], expected[f"{name}/logits"]
        mtp_logits = expected.get(f"{name}/mtp_logits")
    family = family_from_config(CONFIGS[name])
    shapes = {
        source: shape
        for tensor in family.tensors()
        for source, shape in zip(tensor.sources, tensor.source_shapes, strict=True)
    }
    weights = pack_weights(family.tensors(), {source: tensor_of(source, shape) for source, shape in shapes.items()})
    text = np.concatenate([prompt_of(name), greedy, [0]])
    target, *drafts = target_and_mtp(family, weights, as_row(text))
    assert_logits_close(target[0, PROMPT_LEN - NUM_ROWS : PROMPT_LEN], logits, 1e-4)
    assert np.argmax(target[0, PROMPT_LEN - 1 : -1], axis=-1).tolist() == greedy.tolist()
    if mtp_logits is not None:
        assert_logits_close(drafts[0][0, LENGTH - 1 - NUM_ROWS : LENGTH - 1], mtp_logits, 1e-4)
    assert len(drafts) == (mtp_logits is not None)
