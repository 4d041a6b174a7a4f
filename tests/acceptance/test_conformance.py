"""What every acceptance rule of the table must satisfy."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.acceptance.api import AcceptanceRule
from mtp_jax.acceptance.match import Match
from mtp_jax.acceptance.registry import RULES
from mtp_jax.core.config import SamplingParams, SpeculativeConfig
from mtp_jax.core.types import Accepted, Drafts, SlotView
from mtp_jax.ops.sharding import NO_PARALLEL
from mtp_jax.testing.rows import sampling_rows, slot_view

VOCAB = 8


def slots_of(caps: list[int], width: int, temperature: float = 0.0) -> SlotView:
    return slots_with([SamplingParams(temperature=temperature)] * len(caps), caps, width)


def slots_with(params: list[SamplingParams], caps: list[int], width: int) -> SlotView:
    sampling = sampling_rows(*params)
    return slot_view(sampling, vocab_size=VOCAB, draft_len=width - 1, draft_cap=jnp.array(caps, jnp.int32))


def verdict(rule: AcceptanceRule, drafts_BK: np.ndarray, logits_BWV: np.ndarray, slots: SlotView) -> Accepted:
    drafts = Drafts(tokens_BK=jnp.asarray(drafts_BK, jnp.int32))
    return _jitted(rule)(drafts, jnp.asarray(logits_BWV, jnp.float32), slots, NO_PARALLEL)


@functools.cache
def _jitted(rule: AcceptanceRule) -> Any:
    return jax.jit(rule.accept, static_argnums=3)


@pytest.fixture(params=[*((name, {}) for name in RULES), ("rejection", {"block_verification": True})], ids=str)
def rule(request: pytest.FixtureRequest) -> AcceptanceRule:
    name, options = request.param
    return RULES[name](SpeculativeConfig(**options, **({"acceptance": name} if options else {})))


def test_rules_are_frozen_and_hashable(rule: AcceptanceRule) -> None:
    assert isinstance(rule, AcceptanceRule)
    assert hash(rule) == hash(rule)


@pytest.mark.parametrize("has_sampled_neighbour", [False, True], ids=["all greedy", "beside a sampled slot"])
@pytest.mark.parametrize("draft_len", range(7))
def test_all_masks_and_caps_against_a_loop(rule: AcceptanceRule, draft_len: int, has_sampled_neighbour: bool) -> None:
    """Greedy target, drafts right or wrong at each place in every combination, under every cap.

    Beside a sampled slot a rule that draws judges the greedy ones by the same laws as that one.
    """
    target = [(3 * w + 1) % VOCAB for w in range(draft_len + 1)]
    cases = list(itertools.product(itertools.product((True, False), repeat=draft_len), range(draft_len + 1)))
    drafts = np.array(
        [
            [token if right else (token + 1) % VOCAB for token, right in zip(target, mask, strict=False)]
            for mask, _ in cases
        ]
    ).reshape(len(cases), draft_len)
    logits = np.broadcast_to(np.eye(VOCAB)[target], (len(cases), draft_len + 1, VOCAB))
    params = [SamplingParams(temperature=0)] * len(cases)
    if has_sampled_neighbour:  # the last case once more, which nobody looks at
        params.append(SamplingParams(temperature=1.0))
        drafts, logits = np.concatenate([drafts, drafts[-1:]]), np.concatenate([logits, logits[-1:]])
    caps = [cap for _, cap in (*cases, cases[-1])][: len(params)]
    accepted = verdict(rule, drafts, logits, slots_with(params, caps, draft_len + 1))
    for case, (mask, cap) in enumerate(cases):
        num_accepted = 0
        while num_accepted < cap and mask[num_accepted]:
            num_accepted += 1
        assert int(accepted.num_accepted[case]) == num_accepted
        assert accepted.tokens_BE[case, : num_accepted + 1].tolist() == target[: num_accepted + 1]


def test_match_emits_the_targets_own_draws_whatever_is_drafted() -> None:
    """At temperature 1, for 64 noises: the same tokens for every draft, and the drafts that equal them stand."""
    num_slots, width = 64, 3
    logits = np.random.default_rng(0).normal(size=(num_slots, width, VOCAB))
    slots = slots_of([2] * num_slots, width, temperature=1.0)
    own = np.argmax(logits.astype(np.float32) + np.asarray(slots.noise_BWV), axis=-1)
    assert len({tuple(row) for row in own.tolist()}) > num_slots / 2  # the noise is not the same everywhere
    for first, second in itertools.product(range(VOCAB), repeat=2):
        drafts = np.tile([first, second], (num_slots, 1))
        accepted = verdict(Match(), drafts, logits, slots)
        np.testing.assert_array_equal(accepted.tokens_BE, own)
        is_right = drafts == own[:, :2]
        np.testing.assert_array_equal(accepted.num_accepted, is_right.cumprod(axis=1).sum(axis=1))
