"""Rejection sampling keeps the target's law when it draws: streams, steps and filters, in 200,000 texts."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Float

from mtp_jax.acceptance import rejection
from mtp_jax.acceptance.match import Match
from mtp_jax.acceptance.rejection import Rejection
from mtp_jax.core.config import SamplingParams
from mtp_jax.core.types import Accepted, Drafts, SamplingRows
from mtp_jax.ops.filters import filter_logits
from mtp_jax.ops.sampling import Stream, block_keys, gumbel_noise
from mtp_jax.ops.sharding import NO_PARALLEL
from mtp_jax.proposers import drawing
from mtp_jax.proposers.drawing import with_next_draft
from mtp_jax.testing.oracle import filtered_logits
from mtp_jax.testing.rows import sampling_rows, slot_view
from tests.laws.rejection import Bench, logits, reversed_law, surprise_of

BOUND = 10  # standard deviations of chi-square: no false alarm, and 1% of total variation shows
TOKENS, BLOCK = Rejection(), Rejection(block_verification=True)
WARM = SamplingParams(temperature=1.0)
FILTERED = SamplingParams(temperature=1.5, top_k=6, top_p=0.85)


def bench(
    rule: Rejection, vocab_size: int, params: SamplingParams = WARM, draft_sampling: Any = "probabilistic"
) -> Bench:
    target = logits(vocab_size, vocab_size)
    return Bench(rule, target, reversed_law(target), params, draft_sampling)


def next_law(one: Bench) -> Float[np.ndarray, "V V"]:
    """Of the token after each token, filters written out."""
    laws = np.exp([filtered_logits(row, one.params).astype(np.float64) for row in one.target_VV])
    return laws / laws.sum(axis=1, keepdims=True)


def surprise_of_first(one: Bench, draft_len: int, *, num_rounds: int = 8) -> float:
    tokens = one.run((draft_len,), num_rounds=num_rounds)[:, 0]
    return surprise_of(np.bincount(tokens, minlength=len(one.target_VV)), next_law(one)[0])


def surprise_of_pairs(one: Bench, draft_lens: tuple[int, ...], *, num_rounds: int = 8) -> float:
    """Of tokens 1 and 2 and of tokens 2 and 3, jointly: the larger of both."""
    size, law_VV = len(one.target_VV), next_law(one)
    tokens = one.run(draft_lens, num_rounds=num_rounds)
    found = []
    for first, start_V in enumerate((law_VV[0], law_VV[0] @ law_VV)):
        counts = np.bincount(tokens[:, first] * size + tokens[:, first + 1], minlength=size * size)
        found.append(surprise_of(counts, (start_V[:, None] * law_VV).reshape(-1)))
    return max(found)


@pytest.mark.parametrize(
    ("rule", "draft_sampling"),
    [
        pytest.param(TOKENS, "probabilistic", id="tokens"),
        pytest.param(TOKENS, "greedy", id="tokens, one-hot", marks=pytest.mark.long),
        pytest.param(BLOCK, "probabilistic", id="block", marks=pytest.mark.long),
        pytest.param(BLOCK, "greedy", id="block, one-hot", marks=pytest.mark.long),
    ],
)
def test_bug_b01_adversarial_drafts_leave_the_law_alone(rule: Rejection, draft_sampling: str) -> None:
    """Vocabulary 16, the drafter's law the target's reversed."""
    assert surprise_of_first(bench(rule, 16, draft_sampling=draft_sampling), 2) < BOUND


@pytest.mark.parametrize(
    ("rule", "draft_lens"),
    [
        pytest.param(TOKENS, (3, 0, 3, 3), id="tokens, 3 0 3 3"),
        pytest.param(BLOCK, (2, 4, 2), id="block, 2 4 2", marks=pytest.mark.long),
        pytest.param(TOKENS, (2, 4, 2), id="tokens, 2 4 2", marks=pytest.mark.long),
        pytest.param(TOKENS, (3, 0, 0, 3, 3), id="tokens, 3 0 0 3 3", marks=pytest.mark.long),
        pytest.param(BLOCK, (3, 0, 3, 3), id="block, 3 0 3 3", marks=pytest.mark.long),
        pytest.param(BLOCK, (3, 0, 0, 3, 3), id="block, 3 0 0 3 3", marks=pytest.mark.long),
    ],
)
def test_b08_two_tokens_keep_their_joint_law(rule: Rejection, draft_lens: tuple[int, ...]) -> None:
    assert surprise_of_pairs(bench(rule, 8), draft_lens) < BOUND


def test_filters_shape_the_law_of_target_and_drafts_alike() -> None:
    """Temperature, then top-k, then top-p: neither side may take them in another order, or leave one out."""
    assert surprise_of_pairs(bench(TOKENS, 8, FILTERED), (2, 2, 2), num_rounds=2) < BOUND


def test_as_many_first_drafts_stand_as_the_laws_share() -> None:
    """Sum of min(p, q), within 4 sigma."""
    one = bench(TOKENS, 16)
    p_V, q_V = next_law(one)[0], next_law(replace(one, target_VV=one.drafter_VV))[0]
    share = float(np.minimum(p_V, q_V).sum())
    num_accepted = one.verdict(1).num_accepted
    assert abs(num_accepted.mean() - share) < 4 * np.sqrt(share * (1 - share) / len(num_accepted))


def test_bug_b02_what_is_drawn_depends_on_seed_and_position_alone() -> None:
    """Not on the slot, and not on who else is in the batch or what they do."""
    num_slots = 40
    one = replace(bench(BLOCK, 8), num_slots=num_slots)
    order = np.random.default_rng(0).permutation(num_slots)
    others_draft_less = jnp.array(np.where(np.arange(num_slots) % 2, 3, 0), jnp.int32)
    straight = one.verdict(3, seeds=range(num_slots))
    shuffled = one.verdict(3, seeds=order.tolist())
    beside_others = one.verdict(3, seeds=range(num_slots), draft_cap=others_draft_less)
    np.testing.assert_array_equal(straight.tokens_BE[order], shuffled.tokens_BE)
    np.testing.assert_array_equal(straight.tokens_BE[1::2], beside_others.tokens_BE[1::2])
    assert len({tuple(row) for row in straight.tokens_BE.tolist()}) > 4


def test_bug_b08_drafts_follow_the_very_law_that_goes_along() -> None:
    """Filters, and logits so near each other that rounding could merge them."""
    logits_V = np.array([1.0, 1.0 + 2**-8, 1.0 - 2**-9, 0.5, 0.0, -3.0], np.float32)
    params = SamplingParams(temperature=0.7, top_k=5)
    slots = slot_view(sampling_rows(*[params] * 25_000), vocab_size=6, draft_len=1)
    none = Drafts(jnp.zeros((25_000, 0), jnp.int32))
    logits_B1V = jnp.broadcast_to(logits_V, (25_000, 1, 6))
    drafts = jax.jit(with_next_draft, static_argnums=(3, 4))(none, logits_B1V, slots, "probabilistic", NO_PARALLEL)
    assert drafts.probs_BKV is not None
    law_V = np.asarray(drafts.probs_BKV[0, 0])
    assert law_V[5] == 0
    np.testing.assert_array_equal(drafts.probs_BKV, np.broadcast_to(law_V, (25_000, 1, 6)))
    assert surprise_of(np.bincount(np.asarray(drafts.tokens_BK)[:, 0], minlength=6), law_V) < BOUND


def test_drafts_of_greedy_slots_are_certain_whether_or_not_others_draw() -> None:
    none, logits_B1V = Drafts(jnp.zeros((2, 0), jnp.int32)), jnp.array([[[0.0, 2.0, 1.0]]] * 2)
    for other in (0.0, 1.0):
        rows = sampling_rows(SamplingParams(temperature=0), SamplingParams(temperature=other))
        slots = slot_view(rows, vocab_size=3, draft_len=1)
        drafts = with_next_draft(none, logits_B1V, slots, "probabilistic", NO_PARALLEL)
        assert drafts.probs_BKV is not None
        assert (int(drafts.tokens_BK[0, 0]), drafts.probs_BKV[0, 0].tolist()) == (1, [0.0, 1.0, 0.0])


def test_bug_b11_greedy_rows_among_sampled_ones_are_exactly_those_of_match() -> None:
    """Whatever is drafted and however it is judged; caps and ties included.

    So is the token of a sampled slot that has no draft: nothing was rejected.
    """
    rng = np.random.default_rng(0)
    num_slots, num_drafts = 64, 2
    logits_BWV = rng.integers(0, 4, size=(num_slots, num_drafts + 1, 8)).astype(np.float32)  # ties
    params = [SamplingParams(temperature=(0.0, 0.7, 0.0, 2.0)[slot % 4], top_k=slot % 3) for slot in range(num_slots)]
    cap_B = jnp.array(rng.integers(0, num_drafts + 1, size=num_slots), jnp.int32)
    slots = slot_view(sampling_rows(*params), vocab_size=8, draft_len=num_drafts, draft_cap=cap_B)
    best_BK = logits_BWV.argmax(axis=-1)[:, :num_drafts]
    tokens_BK = np.where(rng.random((num_slots, num_drafts)) < 0.7, best_BK, rng.integers(0, 8, best_BK.shape))
    one_hot_BKV = np.eye(8, dtype=np.float32)[tokens_BK]
    is_greedy_B = np.array([one.temperature == 0 for one in params])

    def verdict(rule: Any, probs_BKV: Any = None) -> Accepted:
        drafts = Drafts(jnp.array(tokens_BK, jnp.int32), probs_BKV)
        return jax.device_get(jax.jit(rule.accept, static_argnums=3)(drafts, jnp.array(logits_BWV), slots, NO_PARALLEL))

    match = verdict(Match())
    undrafted_B = np.asarray(cap_B) == 0
    assert (undrafted_B & ~is_greedy_B).any()
    for judged in (verdict(TOKENS), verdict(TOKENS, one_hot_BKV), verdict(BLOCK, one_hot_BKV)):
        np.testing.assert_array_equal(judged.tokens_BE[undrafted_B, 0], match.tokens_BE[undrafted_B, 0])
        for slot in np.flatnonzero(is_greedy_B):
            length = int(match.num_accepted[slot])
            assert int(judged.num_accepted[slot]) == length
            np.testing.assert_array_equal(judged.tokens_BE[slot, : length + 1], match.tokens_BE[slot, : length + 1])


# ---- the checks above are shown to notice faults


def draft_noise(key_B2: Any, positions_BW: Any, stream: Stream, token_ids_V: Any) -> Any:
    """The noise of the drafts, whatever is asked for."""
    length_B = jnp.zeros(positions_BW.shape[:1], jnp.int32)  # of a first step
    return gumbel_noise(block_keys(key_B2, length_B), positions_BW, Stream.DRAFT, token_ids_V)


def coins_of_drafts(key_B2: Any, positions_BW: Any, stream: Stream) -> Any:
    noise_BW1 = draft_noise(key_B2, positions_BW, stream, jnp.zeros((1,), jnp.int32))
    return jnp.exp(-jnp.exp(-noise_BW1[..., 0]))


def top_p_first(whole_BWV: Any, rows: SamplingRows, *others: Any) -> Any:
    """Top-p of the law before temperature."""
    warm = replace(rows, temperature_B=jnp.ones_like(rows.temperature_B))
    return filter_logits(whole_BWV, warm) / rows.temperature_B[:, None, None]


def test_a_token_drawn_with_its_fallen_drafts_noise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "gumbel_noise", draft_noise)
    assert surprise_of_first(bench(TOKENS, 16), 3, num_rounds=1) > 2 * BOUND


def test_coins_made_of_the_drafts_noise_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "uniform_coins", coins_of_drafts)
    assert surprise_of_first(bench(TOKENS, 16), 3, num_rounds=1) > 2 * BOUND


def test_filters_in_another_order_on_one_side_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "law_of_head", top_p_first)
    assert surprise_of_pairs(bench(TOKENS, 8, FILTERED), (2, 2, 2), num_rounds=1) > 2 * BOUND


def test_a_block_that_meets_the_last_blocks_noise_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fell was looked at: so blocks have noise of their own."""
    assert surprise_of_pairs(bench(BLOCK, 4), (3, 3, 3), num_rounds=2) < BOUND
    for module in (rejection, drawing):
        monkeypatch.setattr(module, "block_keys", lambda key_B2, committed_len_B: key_B2)
    assert surprise_of_pairs(bench(BLOCK, 4), (3, 3, 3), num_rounds=2) > 2 * BOUND
