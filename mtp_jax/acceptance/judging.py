"""Rejection sampling itself: which drafts stand under given coins, and the law of the token that follows them.

Pure functions of laws and coins, without keys: so the laws can be checked by trying every interval of every coin once.
Row w of the target's law speaks of draft w, the last row of the token after all drafts.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.acceptance.api import accepted_prefix_len, within_cap
from mtp_jax.core.types import Drafts


class Judgement(NamedTuple):
    """`weights_BV`, not normalised: the law of the token after the accepted drafts.

    `is_refused`: that token stands in place of a draft that fell; else it is the bonus token, drawn from the target.
    """

    num_accepted: Int[Array, " B"]
    is_refused: Bool[Array, " B"]
    weights_BV: Float[Array, "B V"]


Judge = Callable[
    [Drafts, Float[Array, "B W V"], Int[Array, " B"], Float[Array, "B K"]],
    Judgement,
]


def judge_tokens(
    drafts: Drafts,
    target_probs_BWV: Float[Array, "B W V"],
    draft_cap_B: Int[Array, " B"],
    coins_BK: Float[Array, "B K"],
) -> Judgement:
    """Each draft by itself, up to the first that falls (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318).

    Draft x stands iff coin * q(x) < p(x), with q the law it was drawn from (1 at itself where the law is one-hot).
    Strictly: a token without probability never stands, whatever the coin. After the first that falls the token follows
    max(p - q, 0); after `draft_cap` drafts that all stand, p. That the remainder is zero everywhere although a draft
    fell happens only where p and q differ by rounding; p is the law then.

    Coins in [0, 1); probabilities in float32, each row adding up to 1.

    >>> import jax.numpy as jnp
    >>> target = jnp.array([[[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]])
    >>> drafts = Drafts(jnp.array([[0]]), jnp.array([[[0.8, 0.0, 0.2]]]))
    >>> kept = judge_tokens(drafts, target, jnp.array([1]), jnp.array([[0.6]]))  # 0.6 * 0.8 < 0.5
    >>> kept.num_accepted.tolist(), kept.weights_BV.tolist()
    ([1], [[0.0, 0.0, 1.0]])
    >>> fallen = judge_tokens(drafts, target, jnp.array([1]), jnp.array([[0.7]]))
    >>> fallen.num_accepted.tolist(), fallen.weights_BV.tolist()
    ([0], [[0.0, 0.5, 0.0]])
    """
    num_drafts = drafts.tokens_BK.shape[1]
    if num_drafts == 0:
        return _nothing_to_judge(target_probs_BWV)
    p_BK, q_BK = _probs_of_drafts(drafts, target_probs_BWV)
    num_accepted = accepted_prefix_len(coins_BK * q_BK < p_BK, draft_cap_B)
    is_refused = num_accepted < draft_cap_B
    row_BV = _row(target_probs_BWV, num_accepted)
    fallen = jnp.minimum(num_accepted, num_drafts - 1)
    remainder_BV = _remainder(
        row_BV[:, None],
        Drafts(
            jnp.take_along_axis(drafts.tokens_BK, fallen[:, None], axis=1),
            None if drafts.probs_BKV is None else _row(drafts.probs_BKV, fallen)[:, None],
        ),
        jnp.ones_like(p_BK[:, :1]),
    )[:, 0]
    return Judgement(num_accepted, is_refused, _following(row_BV, remainder_BV, is_refused))


def judge_block(
    drafts: Drafts,
    target_probs_BWV: Float[Array, "B W V"],
    draft_cap_B: Int[Array, " B"],
    coins_BK: Float[Array, "B K"],
) -> Judgement:
    """All drafts as one block: keeps at least as many on average (Sun et al., arXiv 2403.10444, algorithm 2).

    With r_0 = 1 and r_i = min(r_{i-1} p(x_i) / q(x_i), 1), prefix i is kept with h_i = s_i / (s_i + 1 - r_i), where s_i
    is the sum over x of max(r_i p(x) - q(x), 0) after it; the whole block (`draft_cap` drafts) with r. The longest kept
    prefix stands, and the token after it follows max(r_i p - q, 0).

    A verdict depends on drafts and coins beyond the tokens it emits, so neither may be seen again: both are drawn with
    `block_keys`.

    Here the second draft makes up for the first, which alone would have fallen:

    >>> import jax.numpy as jnp
    >>> target = jnp.array([[[0.5, 0.5], [1.0, 0.0], [0.5, 0.5]]])
    >>> drafts = Drafts(jnp.array([[0, 0]]), jnp.array([[[1.0, 0.0], [0.5, 0.5]]]))
    >>> coins = jnp.array([[0.6, 0.6]])
    >>> [int(judge(drafts, target, jnp.array([2]), coins).num_accepted[0]) for judge in (judge_tokens, judge_block)]
    [0, 2]
    """
    num_drafts = drafts.tokens_BK.shape[1]
    if num_drafts == 0:
        return _nothing_to_judge(target_probs_BWV)
    p_BK, q_BK = _probs_of_drafts(drafts, target_probs_BWV)
    ratio_BK = jnp.where(q_BK > 0, p_BK / jnp.where(q_BK > 0, q_BK, 1.0), 0.0)
    reach = [jnp.ones_like(ratio_BK[:, 0])]  # r_0 ... r_K
    for k in range(num_drafts):
        reach.append(jnp.minimum(reach[-1] * ratio_BK[:, k], 1.0))
    reach_BW = jnp.stack(reach, axis=1)
    remainder_BKV = _remainder(target_probs_BWV[:, :-1], drafts, reach_BW[:, :-1])
    room_BK = jnp.sum(remainder_BKV, axis=-1)[:, 1:]
    odds_BK = room_BK + (1.0 - reach_BW[:, 1:-1])
    # 0 / 0: the prefix is as likely under both laws, and so is every next token.
    keep_BK = jnp.where(odds_BK > 0, room_BK / jnp.where(odds_BK > 0, odds_BK, 1.0), 1.0)
    keep_BK = jnp.concatenate([keep_BK, reach_BW[:, -1:]], axis=1)
    length_1K = jnp.arange(1, num_drafts + 1, dtype=jnp.int32)[None, :]
    keep_BK = jnp.where(length_1K == draft_cap_B[:, None], reach_BW[:, 1:], keep_BK)
    is_kept_BK = (coins_BK < keep_BK) & within_cap(draft_cap_B, num_drafts)
    num_accepted = jnp.max(jnp.where(is_kept_BK, length_1K, 0), axis=1)
    is_refused = num_accepted < draft_cap_B
    remainder_BV = _row(remainder_BKV, jnp.minimum(num_accepted, num_drafts - 1))
    row_BV = _row(target_probs_BWV, num_accepted)
    return Judgement(num_accepted, is_refused, _following(row_BV, remainder_BV, is_refused))


def _nothing_to_judge(target_probs_BWV: Float[Array, "B W V"]) -> Judgement:
    none = jnp.zeros((target_probs_BWV.shape[0],), jnp.int32)
    return Judgement(none, none > 0, target_probs_BWV[:, 0])


def _probs_of_drafts(drafts: Drafts, target_probs_BWV: Array) -> tuple[Array, Array]:
    """Of each draft: its probability under the target, and under the law it was drawn from."""
    ids_BK1 = drafts.tokens_BK[..., None]
    p_BK = jnp.take_along_axis(target_probs_BWV[:, :-1], ids_BK1, axis=-1)[..., 0]
    if drafts.probs_BKV is None:
        return p_BK, jnp.ones_like(p_BK)
    return p_BK, jnp.take_along_axis(drafts.probs_BKV, ids_BK1, axis=-1)[..., 0]


def _remainder(target_probs_BKV: Array, drafts: Drafts, scale_BK: Array) -> Array:
    """max(scale * p - q, 0) at each draft's place; scale is at most 1."""
    scaled_BKV = scale_BK[..., None] * target_probs_BKV
    if drafts.probs_BKV is not None:
        return jnp.maximum(scaled_BKV - drafts.probs_BKV, 0.0)
    ids_11V = jnp.arange(scaled_BKV.shape[-1], dtype=jnp.int32)[None, None, :]
    return jnp.where(ids_11V == drafts.tokens_BK[..., None], 0.0, scaled_BKV)


def _following(row_BV: Array, remainder_BV: Array, is_refused: Array) -> Array:
    has_remainder = jnp.any(remainder_BV > 0, axis=-1)
    return jnp.where((is_refused & has_remainder)[:, None], remainder_BV, row_BV)


def _row(x_BWV: Array, index_B: Array) -> Array:
    return jnp.take_along_axis(x_BWV, index_B[:, None, None], axis=1)[:, 0]
