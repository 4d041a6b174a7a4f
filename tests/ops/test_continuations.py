"""The branches of a tree: what `choose_tokens` would sooner take than any other, in the target's ids."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.core.config import SamplingParams
from mtp_jax.ops.continuations import likeliest_greedy_tokens, likeliest_tokens
from mtp_jax.ops.sharding import NO_PARALLEL
from mtp_jax.testing.oracle import filtered_logits, log_softmax
from mtp_jax.testing.rows import no_text, sampling_rows

VOCAB, NUM_ROWS, NUM_TOKENS = 9, 2, 3
IDS = np.array([7, 0, 4, 8, 1])
"""A drafter's own vocabulary, in no order."""
PARAMS = [SamplingParams(temperature=0), SamplingParams(temperature=0.7, top_k=4), SamplingParams(temperature=1.5)]


def cases(ids: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a head with these columns, and noise of every token."""
    rng = np.random.default_rng(0)
    num_columns = VOCAB if ids is None else len(ids)
    logits_BWN = rng.normal(size=(len(PARAMS), NUM_ROWS, num_columns)).astype(np.float32)
    return logits_BWN, rng.gumbel(size=(len(PARAMS), NUM_ROWS, VOCAB)).astype(np.float32)


def whole(logits_N: np.ndarray, ids: np.ndarray | None) -> np.ndarray:
    if ids is None:
        return logits_N
    whole_V = np.full(VOCAB, -np.inf, np.float32)
    whole_V[ids] = logits_N
    return whole_V


@pytest.mark.parametrize("ids", [None, IDS], ids=["whole vocabulary", "a drafter's own"])
def test_they_are_the_best_by_logits_and_noise(ids: np.ndarray | None) -> None:
    """A greedy slot beside sampled ones takes no noise; a chance is the softmax of what ranks."""
    logits_BWN, noise_BWV = cases(ids)
    text = no_text(jnp.asarray(noise_BWV))
    ids_N = None if ids is None else jnp.asarray(ids)
    tokens, chances = jax.jit(likeliest_tokens, static_argnums=(4, 5))(
        logits_BWN, noise_BWV, sampling_rows(*PARAMS), text, NUM_TOKENS, NO_PARALLEL, ids_N
    )
    for slot, params in enumerate(PARAMS):
        for row in range(NUM_ROWS):
            scores_V = whole(logits_BWN[slot, row], ids)
            if params.temperature > 0:
                scores_V = filtered_logits(scores_V, params) + noise_BWV[slot, row]
            best = np.argsort(-scores_V, kind="stable")[:NUM_TOKENS]
            assert tokens[slot, row].tolist() == best.tolist()
            np.testing.assert_allclose(chances[slot, row], log_softmax(scores_V)[best], atol=1e-5)


@pytest.mark.parametrize("ids", [None, IDS], ids=["whole vocabulary", "a drafter's own"])
def test_greedy_ones_are_the_best_by_logits_at_any_temperature(ids: np.ndarray | None) -> None:
    logits_BWN, noise_BWV = cases(ids)
    ids_N = None if ids is None else jnp.asarray(ids)
    tokens, chances = likeliest_greedy_tokens(jnp.asarray(logits_BWN), NUM_TOKENS, ids_N=ids_N)
    all_greedy = sampling_rows(*[SamplingParams(temperature=0)] * len(PARAMS))
    again = likeliest_tokens(
        jnp.asarray(logits_BWN), jnp.asarray(noise_BWV), all_greedy, no_text(jnp.asarray(noise_BWV)), NUM_TOKENS,
        ids_N=ids_N,
    )  # fmt: skip
    np.testing.assert_array_equal(again[0], tokens)
    np.testing.assert_array_equal(again[1], chances)
    for slot in range(len(PARAMS)):
        for row in range(NUM_ROWS):
            logits_V = whole(logits_BWN[slot, row], ids)
            best = np.argsort(-logits_V, kind="stable")[:NUM_TOKENS]
            assert tokens[slot, row].tolist() == best.tolist()
            np.testing.assert_allclose(chances[slot, row], log_softmax(logits_V)[best], atol=1e-5)
