"""Two drafters in one: prompt lookup where the match is long, a model's drafts elsewhere.

A long match is right more often than a drafter of one layer, and has no position at which it tires. The model drafts in
every step all the same: its cache has to be kept whole, and which slots have a match is data.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from mtp_jax.core.types import Drafts, SlotView
from mtp_jax.models.bound import BoundModel
from mtp_jax.proposers.api import DraftKV
from mtp_jax.proposers.method import Method
from mtp_jax.proposers.mtp import MTP
from mtp_jax.proposers.ngram import NGRAM, PromptLookup, match_lens
from mtp_jax.proposers.over_base import OverBase


@dataclass(frozen=True)
class LookupFirst(OverBase):
    """The drafts of `lookup` in slots where it finds enough, those of `base` in the others."""

    lookup: PromptLookup

    def propose(
        self, model: BoundModel, carry: Any, draft_kv: DraftKV, slots: SlotView, *, draft_len: int
    ) -> tuple[Drafts, Any, DraftKV]:
        drafts, carry, draft_kv = self.base.propose(model, carry, draft_kv, slots, draft_len=draft_len)
        found = self.lookup(slots, draft_len)
        return _instead(found, drafts, draft_len), carry, draft_kv


def _instead(found: Drafts, drafts: Drafts, draft_len: int) -> Drafts:
    """`found` in the slots in which something was; its drafts were not drawn by chance, so their law is one-hot."""
    is_found_B = found.num_proposed == draft_len
    tokens_BK = jnp.where(is_found_B[:, None], found.tokens_BK, drafts.tokens_BK)
    if drafts.probs_BKV is None:
        return replace(drafts, tokens_BK=tokens_BK)
    certain_BKV = jax.nn.one_hot(tokens_BK, drafts.probs_BKV.shape[-1], dtype=drafts.probs_BKV.dtype)
    return replace(
        drafts,
        tokens_BK=tokens_BK,
        probs_BKV=jnp.where(is_found_B[:, None, None], certain_BKV, drafts.probs_BKV),
    )


NGRAM_MTP = Method(
    lambda family, spec: LookupFirst(MTP.build(family, spec), PromptLookup(*match_lens(spec, shortest=5))),
    options=NGRAM.options | MTP.options,
    problem=MTP.problem,
    longest=MTP.longest,
)
"""A copied run of five tokens or more is preferred to drafts of the MTP layers."""
