"""No drafting: plain decoding, in the same step as everything else."""

import jax.numpy as jnp

from mtp_jax.core.errors import InvariantError
from mtp_jax.core.types import Drafts, SlotView
from mtp_jax.proposers.from_text import FromText
from mtp_jax.proposers.method import Method


def no_drafts(slots: SlotView) -> Drafts:
    """Zero drafts for every slot: `tokens_BK` of shape (B, 0)."""
    return Drafts(tokens_BK=jnp.zeros((slots.live.shape[0], 0), jnp.int32))


def _propose_nothing(slots: SlotView, draft_len: int) -> Drafts:
    if draft_len:
        raise InvariantError(f"plain decoding was asked for {draft_len} drafts")
    return no_drafts(slots)


NO_DRAFT = FromText(_propose_nothing)
PLAIN = Method(lambda family, spec: NO_DRAFT)
