"""Relaxed acceptance: while a request thinks, a draft may stand that the target finds nearly as likely as its best.

As TensorRT-LLM defines it ("relaxed acceptance for thinking", docs/source/features/speculative-decoding.md and its
kernels): among the target's `topk` most likely tokens, and of probability at least that of the best less `delta`.
Lossy: what stands is not what plain decoding writes, and has not its law. Outside of the thinking part, and for
requests that name no thinking tokens, this is `match` to the bit.

Where it differs from there: probabilities are those of the request's own law (temperature, filters, penalties), so
nothing that the request excludes is let in, and a draft that is the target's own token always stands, greedy or drawn;
whether a row thinks follows from the tokens before it, drafts included, so an end mark among the drafts ends it there.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from mtp_jax.acceptance.api import target_after_prefix
from mtp_jax.acceptance.match import Match
from mtp_jax.core.types import Accepted, Drafts, RowText, SlotView
from mtp_jax.ops.branches import if_needed
from mtp_jax.ops.row_text import texts_of_rows
from mtp_jax.ops.sampling import law_of_head, tokens_of_law
from mtp_jax.ops.sharding import Parallel
from mtp_jax.ops.thinking import is_thinking

TOPK, DELTA = 10, 0.6
"""What TensorRT-LLM recommends for DeepSeek-R1."""


def relaxed(topk: int | None, delta: float | None) -> "Relaxed":
    """The rule, with recommended values for what is None.

    >>> relaxed(None, 0.1)
    Relaxed(topk=10, delta=0.1)
    """
    return Relaxed(TOPK if topk is None else topk, DELTA if delta is None else delta)


@dataclass(frozen=True)
class Relaxed:
    """`match`, and in the thinking part also what is among the `topk` likeliest and at most `delta` below the best."""

    topk: int
    delta: float

    @property
    def takes_trees(self) -> bool:
        return False

    def accept(
        self, drafts: Drafts, target_logits_BWV: Float[Array, "B W v"], slots: SlotView, parallel: Parallel
    ) -> Accepted:
        """Costs what `match` does while every slot is greedy and none thinks."""
        rows, text = slots.sampling, texts_of_rows(slots, drafts)
        num_drafts = drafts.tokens_BK.shape[1]
        thinks_BK = is_thinking(text, rows.thinking_ids_B2)[:, :num_drafts] & slots.live[:, None]
        # Where several shards launch they must branch alike: there a request that names thinking tokens counts as one
        # that needs whole logits (`engine.vote`), whether it thinks by now or not.
        needs_law = rows.needs.whole_logits
        if rows.agreed is None:
            needs_law |= jnp.any(thinks_BK)
        return if_needed(
            needs_law,
            lambda: self._judged(drafts, target_logits_BWV, slots, text, thinks_BK, parallel),
            lambda: Match().accept(drafts, target_logits_BWV, slots, parallel),
        )

    def _judged(
        self,
        drafts: Drafts,
        target_logits_BWV: Array,
        slots: SlotView,
        text: RowText,
        thinks_BK: Bool[Array, "B K"],
        parallel: Parallel,
    ) -> Accepted:
        num_drafts = drafts.tokens_BK.shape[1]
        law_BWV = law_of_head(target_logits_BWV, slots.sampling, text, slots.noise_BWV.shape[-1], parallel)
        target_tokens_BW = tokens_of_law(law_BWV, slots.noise_BWV, slots.sampling)

        def near_the_best() -> Bool[Array, "B K"]:
            probs_BKV = jax.nn.softmax(law_BWV[:, :num_drafts], axis=-1)
            own_BK1 = jnp.take_along_axis(probs_BKV, drafts.tokens_BK[..., None], axis=-1)
            num_likelier_BK = jnp.sum(probs_BKV > own_BK1, axis=-1, dtype=jnp.int32)
            is_close_BK = own_BK1[..., 0] >= jnp.max(probs_BKV, axis=-1) - self.delta
            is_among_topk_BK = num_likelier_BK < min(self.topk, probs_BKV.shape[-1])
            return is_among_topk_BK & is_close_BK & (own_BK1[..., 0] > 0)

        is_near_BK = lax.cond(jnp.any(thinks_BK), near_the_best, lambda: jnp.zeros_like(thinks_BK))
        is_right_BK = (drafts.tokens_BK == target_tokens_BW[:, :-1]) | (thinks_BK & is_near_BK)
        return target_after_prefix(drafts, is_right_BK, slots.draft_cap, target_tokens_BW)
