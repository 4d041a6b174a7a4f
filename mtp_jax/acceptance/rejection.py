"""Rejection sampling: the target's law, token by token, from drafts that were drawn with coins of their own.

The text is not the one that plain decoding would have drawn with the same seed, as it is under `match`; its law is the
same. Four independent streams take part, and no number of one is used twice for what anybody sees: DRAFT draws the
drafts, ACCEPT the coins, RESIDUAL the token in place of a fallen draft, TARGET the bonus token.

Drafts and their law: dense (`Drafts.probs_BKV`: the array they were drawn from), or one-hot (argmax and n-gram drafts,
which no coin of their own drew): such a draft stands with probability p(x), else the token follows p without x.

Coupled drafts are refused by the configuration. As one-hot ones they would be exact: a draft depends on the TARGET
noise of its own position alone, and that position's token is then decided by ACCEPT and RESIDUAL, while a bonus token's
TARGET noise made no draft that was looked at. But they would stand with probability sum q(x) p(x), less often than
argmax or drawn drafts do, and block verification does look at drafts that it does not emit. Their place is `match`.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from mtp_jax.acceptance.api import drafts_then
from mtp_jax.acceptance.judging import judge_block, judge_tokens
from mtp_jax.acceptance.match import Match
from mtp_jax.core.types import Accepted, Drafts, SlotView
from mtp_jax.ops.branches import if_needed
from mtp_jax.ops.kv_cache import row_positions
from mtp_jax.ops.laws import draw, row_probs
from mtp_jax.ops.row_text import texts_of_rows
from mtp_jax.ops.sampling import Stream, block_keys, gumbel_noise, law_of_head, tokens_of_law, uniform_coins
from mtp_jax.ops.sharding import Parallel


@dataclass(frozen=True)
class Rejection:
    """Draft by draft, or with `block_verification` the block as a whole. Greedy slots: as under `match`, exactly."""

    block_verification: bool = False

    @property
    def takes_trees(self) -> bool:
        return False

    def accept(
        self, drafts: Drafts, target_logits_BWV: Float[Array, "B W v"], slots: SlotView, parallel: Parallel
    ) -> Accepted:
        return if_needed(
            slots.sampling.needs.whole_logits,
            lambda: self._judged(drafts, target_logits_BWV, slots, parallel),
            lambda: Match().accept(drafts, target_logits_BWV, slots, parallel),
        )

    def _judged(self, drafts: Drafts, target_logits_BWV: Array, slots: SlotView, parallel: Parallel) -> Accepted:
        rows, num_drafts = slots.sampling, drafts.tokens_BK.shape[1]
        vocab_size = slots.noise_BWV.shape[-1]
        law_BWV = law_of_head(target_logits_BWV, rows, texts_of_rows(slots, drafts), vocab_size, parallel)
        target_tokens_BW = tokens_of_law(law_BWV, slots.noise_BWV, rows)

        judge, keys_B2 = judge_tokens, rows.key_B2
        if self.block_verification:
            judge, keys_B2 = judge_block, block_keys(rows.key_B2, slots.committed_len)
        coins_BK = uniform_coins(keys_B2, row_positions(slots.committed_len + 1, num_drafts), Stream.ACCEPT)
        num_accepted, is_refused, weights_BV = judge(drafts, row_probs(law_BWV, rows), slots.draft_cap, coins_BK)

        position_B1 = (slots.committed_len + 1 + num_accepted)[:, None]
        ids_V = jnp.arange(weights_BV.shape[-1], dtype=jnp.int32)
        noise_B1V = gumbel_noise(rows.key_B2, position_B1, Stream.RESIDUAL, ids_V)
        in_place_B1 = draw(weights_BV[:, None], noise_B1V)
        bonus_B1 = jnp.take_along_axis(target_tokens_BW, num_accepted[:, None], axis=1)
        return Accepted(
            num_accepted=num_accepted,
            tokens_BE=drafts_then(drafts, num_accepted, jnp.where(is_refused[:, None], in_place_B1, bonus_B1)),
            target_tokens_BW=target_tokens_BW,
        )
