"""The golden checkpoints: every recorded quantity of an independent implementation is met."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.support import (
    GOLDEN_NAMES,
    Golden,
    as_row,
    assert_logits_close,
    dense_kv,
    positions_of,
    run_draft,
    run_target,
)

pytestmark = pytest.mark.optimized

CASES = (0, 1, 2)
LENGTH = 96


@pytest.fixture(scope="module", params=GOLDEN_NAMES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden.load(request.param)


def full_pass(golden: Golden, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states and logits of a whole sequence, padded to one length so that one program serves all."""
    padded = np.zeros(LENGTH, np.int32)
    padded[: len(tokens)] = tokens
    kv = dense_kv(golden.family.kv_specs(), 1, LENGTH)
    hidden, logits, _ = run_target(golden.family, golden.weights, as_row(padded), positions_of(LENGTH), kv)
    return np.asarray(hidden[0, : len(tokens)]), np.asarray(logits[0, : len(tokens)])


@pytest.mark.parametrize("case", CASES)
def test_prompt_logits_and_hidden_states(golden: Golden, case: int) -> None:
    hidden, logits = full_pass(golden, golden.expected[f"prompt_{case}"])
    assert_logits_close(logits, golden.expected[f"logits_{case}"])
    assert_logits_close(hidden, golden.expected[f"last_hidden_{case}"])


@pytest.mark.parametrize("case", CASES)
def test_greedy_continuation_one_token_at_a_time(golden: Golden, case: int) -> None:
    prompt, greedy = golden.expected[f"prompt_{case}"], golden.expected[f"greedy_{case}"]
    kv = dense_kv(golden.family.kv_specs(), 1, LENGTH)
    _, logits, kv = run_target(golden.family, golden.weights, as_row(prompt), positions_of(len(prompt)), kv)
    tokens = [int(jnp.argmax(logits[0, -1]))]
    for step in range(len(greedy) - 1):
        at = positions_of(1, len(prompt) + step)
        _, logits, kv = run_target(golden.family, golden.weights, as_row(tokens[-1]), at, kv)
        tokens.append(int(jnp.argmax(logits[0, -1])))
    assert tokens == greedy.tolist()


@pytest.mark.parametrize("case", CASES)
def test_mtp_drafts_at_every_recorded_step(golden: Golden, case: int) -> None:
    expected = golden.expected
    sequence = np.concatenate([expected[f"prompt_{case}"], expected[f"greedy_{case}"]])
    hidden, _ = full_pass(golden, sequence)
    contexts, drafts = expected[f"mtp_draft_context_{case}"], expected[f"mtp_draft_tokens_{case}"]
    for row, known in enumerate(contexts.tolist()):
        logits = draft_chain(golden, sequence[:known], hidden[: known - 1], drafts[row])
        assert [int(np.argmax(of_depth)) for of_depth in logits] == drafts[row].tolist()
        if row < len(expected[f"mtp_draft_logits_{case}"]):
            assert_logits_close(logits, expected[f"mtp_draft_logits_{case}"][row])


def draft_chain(golden: Golden, known: np.ndarray, hidden: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """Logits [D, V] of one draft per MTP layer after `known` tokens, whose last has no hidden state yet.

    Row i of depth d pairs the hidden of position i (the target's, then the layer before's) with token i + 1 + d.
    """
    num_rows = len(known) - 1
    tokens = np.zeros(LENGTH + len(drafts), np.int32)
    tokens[: len(known) + len(drafts)] = np.concatenate([known, drafts])
    recycled = jnp.zeros((1, LENGTH, hidden.shape[1])).at[0, :num_rows].set(hidden)
    logits = []
    for depth in range(golden.family.num_mtp_layers):
        (kv,) = dense_kv(golden.family.draft_kv_specs()[depth : depth + 1], 1, LENGTH)
        shifted = as_row(tokens[1 + depth : 1 + depth + LENGTH])
        recycled, of_depth, _ = run_draft(
            golden.family, golden.weights, depth, shifted, recycled, positions_of(LENGTH), kv
        )
        logits.append(np.asarray(of_depth[0, num_rows - 1]))
    return np.stack(logits)


@pytest.mark.parametrize("case", CASES)
def test_one_layer_applied_recursively(case: int) -> None:
    golden = Golden.load("deepseek_v3_tiny")
    prompt, first = golden.expected[f"prompt_{case}"], golden.expected[f"greedy_{case}"][0]
    hidden, _ = full_pass(golden, prompt)
    (kv,) = dense_kv(golden.family.draft_kv_specs(), 1, LENGTH)
    tokens = as_row([*prompt[1:], first])
    at = positions_of(len(prompt))
    recycled, logits, kv = run_draft(golden.family, golden.weights, 0, tokens, jnp.asarray(hidden[None]), at, kv)
    for step, expected_token in enumerate(golden.expected[f"recursive_draft_tokens_{case}"].tolist()):
        assert_logits_close(logits[0, -1], golden.expected[f"recursive_draft_logits_{case}"][step])
        token = int(jnp.argmax(logits[0, -1]))
        assert token == expected_token
        at = positions_of(1, len(prompt) + step)
        recycled, logits, kv = run_draft(golden.family, golden.weights, 0, as_row(token), recycled[:, -1:], at, kv)
