"""Forced acceptance: the rates are met, the coins are the position's own, and the output says what it is."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.acceptance.match import Match
from mtp_jax.acceptance.registry import rule_of
from mtp_jax.acceptance.rejection import Rejection
from mtp_jax.acceptance.synthetic import Synthetic
from mtp_jax.core.config import SamplingParams, SpeculativeConfig
from mtp_jax.core.types import Accepted, Drafts
from mtp_jax.llm import LLM
from mtp_jax.ops.sharding import NO_PARALLEL
from mtp_jax.testing.rows import sampling_rows, slot_view
from mtp_jax.testing.toy_family import ToyFamily

NUM_SLOTS, VOCAB = 4000, 5
SHARES = (0.8, 0.4, 0.1)


@functools.cache
def verdict(rule: Any, draft_len: int, committed_len: int = 0) -> Accepted:
    sampling = sampling_rows(*[SamplingParams(temperature=0)] * NUM_SLOTS)
    slots = slot_view(
        sampling, vocab_size=VOCAB, draft_len=draft_len, committed_len=jnp.full(NUM_SLOTS, committed_len, jnp.int32)
    )
    drafts = Drafts(jnp.full((NUM_SLOTS, draft_len), 4, jnp.int32))  # never the target's
    logits_BWV = jnp.broadcast_to(jnp.eye(VOCAB)[jnp.arange(draft_len + 1)], (NUM_SLOTS, draft_len + 1, VOCAB))
    return jax.device_get(jax.jit(rule.accept, static_argnums=3)(drafts, logits_BWV, slots, NO_PARALLEL))


FORCED = rule_of(SpeculativeConfig(synthetic_acceptance=SHARES))


def test_drafts_stand_in_the_shares_asked_for() -> None:
    found = verdict(FORCED, 3)
    for position, share in enumerate(SHARES):
        stands = np.asarray(found.num_accepted) > position
        assert abs(stands.mean() - share) < 4 * np.sqrt(share * (1 - share) / NUM_SLOTS)
    for length, tokens in zip(found.num_accepted.tolist(), found.tokens_BE.tolist(), strict=True):
        assert tokens[: length + 1] == [4] * length + [length]  # then the target's own token of that row


def test_a_position_throws_the_same_coin_at_every_draft_length() -> None:
    longest = np.asarray(verdict(FORCED, 3).num_accepted)
    for draft_len in (1, 2):
        np.testing.assert_array_equal(verdict(FORCED, draft_len).num_accepted, np.minimum(longest, draft_len))
    later = np.asarray(verdict(FORCED, 3, committed_len=1).num_accepted)
    assert (later != longest).any()


def test_the_steps_of_one_request_are_independent() -> None:
    """So a request's own share is the one asked for: it is not the same drafts that stand in all of its steps."""
    stands = np.array([np.asarray(verdict(FORCED, 1, length).num_accepted) for length in range(0, 12, 2)]) > 0
    share, num_steps = SHARES[0], len(stands)
    assert abs(stands.mean() - share) < 4 * np.sqrt(share * (1 - share) / stands.size)
    between_slots = stands.mean(axis=0).var()
    assert between_slots == pytest.approx(share * (1 - share) / num_steps, rel=0.15)


def test_certain_rates_are_certain_whatever_the_rule() -> None:
    for inner in (Match(), Rejection()):
        assert (verdict(Synthetic(inner, (1.0, 1.0, 0.0)), 3).num_accepted == 2).all()


def test_the_output_and_the_metrics_say_so() -> None:
    """Through a whole engine: the tokens are lossy, and vLLM's counter shows the shares."""
    family = ToyFamily(draft_hit_percent=0)
    settings: dict[str, Any] = {"max_model_len": 32, "max_num_seqs": 1, "block_size": 4, "prefill_chunk": 16}
    spec = {"num_speculative_tokens": 1, "synthetic_acceptance": [1.0]}
    llm = LLM.from_weights(family, family.init_weights(jax.random.key(0), None), speculative_config=spec, **settings)
    [output] = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    assert output.outputs[0].is_lossy
    metrics = llm.get_metrics()
    assert metrics["is_lossy"]
    assert metrics["spec_decode_num_accepted_tokens_per_pos"] == metrics["spec_decode_num_draft_tokens_per_pos"] == [4]


@pytest.mark.parametrize("fields", [{}, {"acceptance": "rejection"}])
def test_nothing_else_is_marked_lossy(fields: dict[str, str]) -> None:
    assert not SpeculativeConfig(**fields).is_lossy  # type: ignore[arg-type]
