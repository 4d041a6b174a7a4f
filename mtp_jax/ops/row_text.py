"""Which tokens a row speaks after: what penalties and bad words must see, drafts of the same launch included."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mtp_jax.core.types import Drafts, RowText, SlotView
from mtp_jax.ops.trees import ancestor_bits, is_ancestor


def texts_of_rows(slots: SlotView, drafts: Drafts) -> RowText:
    """For verification: row w, of W = K + 1, speaks after the pending token and the drafts on its path, its own last.

    In a chain these are drafts 0..w-1.

    >>> from mtp_jax.core.config import SamplingParams
    >>> from mtp_jax.testing.rows import sampling_rows, slot_view
    >>> slots = slot_view(sampling_rows(SamplingParams()), vocab_size=8, draft_len=2)
    >>> texts_of_rows(slots, Drafts(jnp.array([[5, 6]]))).is_before_BWK.astype(int)[0].tolist()
    [[0, 0], [1, 0], [1, 1]]
    """
    num_drafts = drafts.tokens_BK.shape[1]
    if drafts.parent_BK is None:
        is_before_WK = jnp.tri(num_drafts + 1, num_drafts, -1, dtype=bool)
        is_before_BWK = jnp.broadcast_to(is_before_WK, (slots.live.shape[0], *is_before_WK.shape))
    else:
        is_before_BWK = is_ancestor(ancestor_bits(drafts.parent_BK), num_drafts + 1)[..., 1:]
    return text_of(slots, drafts.tokens_BK, is_before_BWK)


def text_after(slots: SlotView, drafts_BK: Int[Array, "B K"]) -> RowText:
    """For drafting: one row, which speaks after the pending token and all of these drafts."""
    return text_of(slots, drafts_BK, jnp.ones((drafts_BK.shape[0], 1, drafts_BK.shape[1]), bool))


def text_of(slots: SlotView, drafts_BK: Int[Array, "B K"], is_before_BWK: Bool[Array, "B W K"]) -> RowText:
    """Rows that speak after the pending token and those of the drafts that the mask names."""
    return RowText(slots.history_BS, slots.committed_len + 1, drafts_BK, is_before_BWK, slots.facts)
