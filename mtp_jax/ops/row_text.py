"""Which tokens a row speaks after: what penalties and bad words must see, drafts of the same launch included."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from mtp_jax.core.types import Drafts, RowText, SlotView


def texts_of_rows(slots: SlotView, drafts: Drafts) -> RowText:
    """For verification: row w, of W = K + 1, speaks after the pending token and drafts 0..w-1."""
    num_drafts = drafts.tokens_BK.shape[1]
    is_before_WK = jnp.tri(num_drafts + 1, num_drafts, -1, dtype=bool)
    return _of(slots, drafts.tokens_BK, jnp.broadcast_to(is_before_WK, (slots.live.shape[0], *is_before_WK.shape)))


def text_after(slots: SlotView, drafts_BK: Int[Array, "B K"]) -> RowText:
    """For drafting: one row, which speaks after the pending token and all of these drafts."""
    return _of(slots, drafts_BK, jnp.ones((drafts_BK.shape[0], 1, drafts_BK.shape[1]), bool))


def _of(slots: SlotView, drafts_BK: Array, is_before_BWK: Array) -> RowText:
    return RowText(slots.history_BS, slots.committed_len + 1, drafts_BK, is_before_BWK)
