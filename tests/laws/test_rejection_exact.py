"""Rejection sampling keeps the target's law: by trying every draft and every interval of every coin once."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.acceptance.judging import Judge, Judgement, judge_block, judge_tokens
from mtp_jax.core.types import Drafts
from tests.laws.rejection import Chain, jitted, joint_law, random_law

JUDGES = {"tokens": judge_tokens, "block": judge_block}
SIZES = [(3, 1), (3, 2), (3, 3), (4, 2), (5, 1)]


def chain(judge: str, vocab_size: int, *, is_one_hot: bool = False, seed: int = 0, by: Judge | None = None) -> Chain:
    return Chain(
        judge=by or JUDGES[judge],
        target=random_law(vocab_size, seed, num_zeros=1),
        drafter=random_law(vocab_size, seed + 100, num_zeros=1),
        vocab_size=vocab_size,
        is_one_hot=is_one_hot,
        is_block=judge == "block",
    )


def largest_error(one: Chain, draft_lens: tuple[int, ...], length: int) -> float:
    found, wanted = one.emitted(draft_lens, length), joint_law(one.target, length)
    return max(abs(found.get(tokens, 0.0) - wanted.get(tokens, 0.0)) for tokens in {*found, *wanted})


@pytest.mark.parametrize("is_one_hot", [False, True], ids=["dense", "one-hot"])
@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize(("vocab_size", "draft_len"), SIZES)
def test_the_law_of_what_is_emitted_is_the_targets(
    judge: str, vocab_size: int, draft_len: int, is_one_hot: bool
) -> None:
    """Of the first token, and of as many as a step can emit and one more, however many steps they take."""
    one = chain(judge, vocab_size, is_one_hot=is_one_hot)
    assert largest_error(one, (draft_len,), 1) < 1e-6
    length = min(draft_len + 2, 3)
    assert largest_error(one, (draft_len,) * length, length) < 1e-6


@pytest.mark.parametrize("judge", JUDGES)
def test_the_law_holds_under_changing_draft_lengths(judge: str) -> None:
    assert largest_error(chain(judge, 3, seed=7), (2, 0, 3), 3) < 1e-6


@pytest.mark.parametrize("is_one_hot", [False, True], ids=["dense", "one-hot"])
@pytest.mark.parametrize("judge", JUDGES)
def test_a_cap_ends_the_chain_and_the_bonus_token_follows_the_target(judge: str, is_one_hot: bool) -> None:
    """Of three drafts: what is emitted under a cap is what that many drafts would have brought."""
    one = chain(judge, 3, is_one_hot=is_one_hot, seed=3)
    for cap in range(4):
        capped, short = ({}, {})
        for law, draft_len in ((capped, 3), (short, cap)):
            for share, length, tokens in one.step((), draft_len, cap):
                assert length <= cap
                law[length, tokens] = law.get((length, tokens), 0.0) + share
        assert capped.keys() == short.keys()
        assert max(abs(capped[what] - short[what]) for what in short) < 1e-6


def test_as_many_are_accepted_as_the_laws_share() -> None:
    """Draft by draft: prefix x stands with the product of min(p, q); one-hot: with p of the prefix."""
    for is_one_hot in (False, True):
        one = chain("tokens", 4, is_one_hot=is_one_hot, seed=1)

        def share(law_text: tuple[int, ...], one: Chain = one) -> float:
            return float(np.minimum(one.target(law_text), one._draft_law(law_text)).sum())

        def both(text: tuple[int, ...], token: int, one: Chain = one) -> float:
            return float(min(one.target(text)[token], one._draft_law(text)[token]))

        expected = share(()) + sum(both((), token) * share((token,)) for token in range(4))
        assert abs(one.mean_accepted(2) - expected) < 1e-6


def test_a_block_keeps_at_least_as_many_drafts_and_often_more() -> None:
    gains = [chain("block", 3, seed=s).mean_accepted(3) - chain("tokens", 3, seed=s).mean_accepted(3) for s in range(8)]
    assert min(gains) > -1e-6
    assert max(gains) > 0.02


@pytest.mark.parametrize("judge", JUDGES)
def test_bug_b10_no_coin_lets_a_token_without_probability_stand(judge: str) -> None:
    """Coins of 0 and of almost 1; drafts of target probability 0, dense and one-hot; nor is it drawn in their place."""
    target_probs_BWV = jnp.array([[[0.0, 0.25, 0.75, 0.0]] * 3], jnp.float32)
    dense_BKV = jnp.full((1, 2, 4), 0.25)
    for coin in (0.0, 1 - 2**-24):
        for tokens in ([0, 1], [3, 2]):
            for probs_BKV in (None, dense_BKV):
                drafts = Drafts(jnp.array([tokens], jnp.int32), probs_BKV)
                coins_BK = jnp.full((1, 2), coin, jnp.float32)
                found = jitted(JUDGES[judge])(drafts, target_probs_BWV, jnp.array([2], jnp.int32), coins_BK)
                assert int(found.num_accepted[0]) == 0
                assert (np.asarray(found.weights_BV)[0, [0, 3]] == 0).all()


@pytest.mark.parametrize("judge", JUDGES)
def test_a_draft_that_falls_between_equal_laws_is_followed_by_the_target(judge: str) -> None:
    """By rounding alone q may lie above p everywhere: then nothing remains of p - q, and p is the law."""
    p_V = np.array([0.5, 0.5, 0.0], np.float32)
    drafts = Drafts(jnp.array([[0]], jnp.int32), jnp.array(p_V * (1 + 2.0**-22))[None, None])
    coins_BK = jnp.full((1, 1), 1 - 2**-24, jnp.float32)
    found = jitted(JUDGES[judge])(drafts, jnp.array([[p_V, p_V]]), jnp.array([1], jnp.int32), coins_BK)
    assert int(found.num_accepted[0]) == 0
    np.testing.assert_array_equal(found.weights_BV[0], p_V)


# ---- the checks above are shown to notice faults


def stale_law(drafts: Drafts, *rest: object) -> Judgement:
    """The law of the draft before."""
    assert drafts.probs_BKV is not None
    return judge_tokens(Drafts(drafts.tokens_BK, jnp.roll(drafts.probs_BKV, 1, axis=1)), *rest)  # type: ignore[arg-type]


def not_strict(drafts: Drafts, p_BWV: jnp.ndarray, cap_B: jnp.ndarray, coins_BK: jnp.ndarray) -> Judgement:
    """`<=`: a coin of 0 lets a token without probability stand."""
    return judge_tokens(drafts, p_BWV, cap_B, jnp.where(coins_BK == 0, -1.0, coins_BK))


def replaced_from_the_target(drafts: Drafts, p_BWV: jnp.ndarray, *rest: object) -> Judgement:
    """The token in place of a fallen draft follows p."""
    found = judge_tokens(drafts, p_BWV, *rest)  # type: ignore[arg-type]
    return found._replace(weights_BV=p_BWV[jnp.arange(len(p_BWV)), found.num_accepted])


def not_clamped(drafts: Drafts, p_BWV: jnp.ndarray, *rest: object) -> Judgement:
    """p - q with its negative part, as a size."""
    found = judge_tokens(drafts, p_BWV, *rest)  # type: ignore[arg-type]
    slot = jnp.arange(len(p_BWV))
    fallen = jnp.minimum(found.num_accepted, drafts.tokens_BK.shape[1] - 1)
    difference_BV = p_BWV[slot, found.num_accepted] - drafts.probs_BKV[slot, fallen]  # type: ignore[index]
    return found._replace(weights_BV=jnp.where(found.is_refused[:, None], jnp.abs(difference_BV), found.weights_BV))


def cap_forgotten(drafts: Drafts, p_BWV: jnp.ndarray, cap_B: jnp.ndarray, coins_BK: jnp.ndarray) -> Judgement:
    """After a capped chain the token follows the remainder, as if the next draft had fallen."""
    return judge_tokens(drafts, p_BWV, cap_B + 1, jnp.full_like(coins_BK, jnp.inf))


@pytest.mark.parametrize(
    "fault", [stale_law, not_strict, replaced_from_the_target, not_clamped], ids=lambda f: f.__name__
)
def test_a_faulty_judge_is_noticed(fault: Callable[..., Judgement]) -> None:
    one = chain("tokens", 3, seed=4, by=fault)
    try:
        error = largest_error(one, (2, 2), 2)
    except AssertionError:  # an interval of a coin in which it does not always say the same
        return
    assert error > 1e-3


def test_a_judge_that_forgets_the_cap_is_noticed() -> None:
    one = chain("tokens", 3, seed=3, by=cap_forgotten)
    law = joint_law(one.target, 1)
    found = dict.fromkeys(law, 0.0)
    for share, length, tokens in one.step((), 2, 0):
        assert length == 0
        found[tokens] += share
    assert max(abs(found[tokens] - law[tokens]) for tokens in law) > 1e-3
