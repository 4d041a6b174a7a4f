"""Accept a draft iff it is the token that plain decoding would have drawn at that position.

Every emitted token is the target's own draw, so nothing about drafting can change the text: not the draft length, not
the proposer, not the batch. How often drafts match is the proposer's business alone.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.acceptance.api import accepted_prefix_len, within_cap
from mtp_jax.core.types import Accepted, Drafts, SlotView
from mtp_jax.ops.row_text import texts_of_rows
from mtp_jax.ops.sampling import choose_tokens, noise_of_rows
from mtp_jax.ops.sharding import Parallel
from mtp_jax.ops.trees import ancestor_bits, depths, is_ancestor, path_to, rows_of_path


@dataclass(frozen=True)
class Match:
    """Draft == target's own token (argmax at temperature 0, else drawn with the position's noise)."""

    @property
    def takes_trees(self) -> bool:
        return True

    def accept(
        self, drafts: Drafts, target_logits_BWV: Float[Array, "B W v"], slots: SlotView, parallel: Parallel
    ) -> Accepted:
        if drafts.parent_BK is not None:
            return _longest_path(drafts, drafts.parent_BK, target_logits_BWV, slots, parallel)
        text = texts_of_rows(slots, drafts)
        target_tokens_BW = choose_tokens(target_logits_BWV, slots.noise_BWV, slots.sampling, text, parallel)
        return Accepted(
            num_accepted=accepted_prefix_len(drafts.tokens_BK == target_tokens_BW[:, :-1], slots.draft_cap),
            tokens_BE=target_tokens_BW,
            target_tokens_BW=target_tokens_BW,
        )


def _longest_path(
    drafts: Drafts,
    parent_BK: Int[Array, "b K"],
    target_logits_BWV: Float[Array, "B W v"],
    slots: SlotView,
    parallel: Parallel,
) -> Accepted:
    """In a tree: from the pending token on, always the child that is the target's token, until there is none.

    Siblings differ, so at most one child is right, and the drafts all of whose ancestors are right are one path.
    """
    bits_BW = ancestor_bits(parent_BK)
    noise_BWV = noise_of_rows(slots.sampling, slots.noise_BWV, bits_BW)
    text = texts_of_rows(slots, drafts)
    target_tokens_BW = choose_tokens(target_logits_BWV, noise_BWV, slots.sampling, text, parallel)

    wanted_BK = jnp.take_along_axis(target_tokens_BW, parent_BK, axis=1)
    is_right_BK = (drafts.tokens_BK == wanted_BK) & within_cap(slots.draft_cap, parent_BK.shape[1])
    is_right_BW = jnp.pad(is_right_BK, ((0, 0), (1, 0)), constant_values=True)
    is_wrong_before_BWV = is_ancestor(bits_BW, bits_BW.shape[1]) & ~is_right_BW[:, None, :]
    accepted_depth_BW = jnp.where(jnp.any(is_wrong_before_BWV, axis=-1), -1, depths(bits_BW))
    last_row = jnp.argmax(accepted_depth_BW, axis=1).astype(jnp.int32)
    path_BE = path_to(bits_BW, last_row, slots.noise_BWV.shape[1])
    return Accepted(
        num_accepted=jnp.max(accepted_depth_BW, axis=1),
        tokens_BE=rows_of_path(target_tokens_BW, path_BE),
        target_tokens_BW=target_tokens_BW,
        path_BE=path_BE,
    )
