"""Accept a draft iff it is the token that plain decoding would have drawn at that position.

Every emitted token is the target's own draw, so nothing about drafting can change the text: not the draft length, not
the proposer, not the batch. How often drafts match is the proposer's business alone.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from mtp_jax.acceptance.api import accepted_prefix_len
from mtp_jax.core.types import Accepted, Drafts, SlotView
from mtp_jax.ops.row_text import texts_of_rows
from mtp_jax.ops.sampling import choose_tokens
from mtp_jax.ops.sharding import Parallel


@dataclass(frozen=True)
class Match:
    """Draft == target's own token (argmax at temperature 0, else drawn with the position's noise)."""

    def accept(
        self, drafts: Drafts, target_logits_BWV: Float[Array, "B W v"], slots: SlotView, parallel: Parallel
    ) -> Accepted:
        num_rows = target_logits_BWV.shape[1]
        text = texts_of_rows(slots, drafts)
        target_tokens_BW = choose_tokens(target_logits_BWV, slots.noise_BWV, slots.sampling, text, parallel)
        within_cap = jnp.arange(num_rows - 1)[None, :] < slots.draft_cap[:, None]
        is_right_BK = (drafts.tokens_BK == target_tokens_BW[:, :-1]) & within_cap
        return Accepted(
            num_accepted=accepted_prefix_len(is_right_BK),
            tokens_BE=target_tokens_BW,
            target_tokens_BW=target_tokens_BW,
        )
