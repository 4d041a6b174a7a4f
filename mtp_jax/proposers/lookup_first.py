"""Two drafters in one: prompt lookup where the match is long, a model's drafts elsewhere.

A long match is right more often than a drafter of one layer, and has no position at which it tires. The model drafts in
every step all the same: its cache has to be kept whole, and which slots have a match is data.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.core.types import Drafts, KVSpec, LayerKV, SlotView
from mtp_jax.models.api import ModelFamily
from mtp_jax.models.bound import BoundModel
from mtp_jax.proposers.api import DraftProposer, PrefillChunk
from mtp_jax.proposers.ngram import PromptLookup


@dataclass(frozen=True)
class LookupFirst:
    """The drafts of `lookup` in slots where it finds enough, those of `base` in the others."""

    lookup: PromptLookup
    base: DraftProposer

    @property
    def lookahead(self) -> int:
        return self.base.lookahead

    def draft_kv_specs(self, family: ModelFamily) -> tuple[KVSpec, ...]:
        return self.base.draft_kv_specs(family)

    def init_carry(self, family: ModelFamily, *, num_slots: int, max_draft_len: int, dtype: jnp.dtype) -> Any:
        return self.base.init_carry(family, num_slots=num_slots, max_draft_len=max_draft_len, dtype=dtype)

    def prefill(
        self, model: BoundModel, carry: Any, draft_kv: tuple[LayerKV, ...], chunk: PrefillChunk
    ) -> tuple[Any, tuple[LayerKV, ...]]:
        return self.base.prefill(model, carry, draft_kv, chunk)

    def finish_prefill(self, carry: Any, pending_token_Y: Int[Array, " Y"], is_last_Y: Bool[Array, " Y"]) -> Any:
        return self.base.finish_prefill(carry, pending_token_Y, is_last_Y)

    def propose(
        self, model: BoundModel, carry: Any, draft_kv: tuple[LayerKV, ...], slots: SlotView, *, draft_len: int
    ) -> tuple[Drafts, Any, tuple[LayerKV, ...]]:
        drafts, carry, draft_kv = self.base.propose(model, carry, draft_kv, slots, draft_len=draft_len)
        found = self.lookup(slots, draft_len)
        return _instead(found, drafts, draft_len), carry, draft_kv

    def observe(
        self,
        carry: Any,
        hidden_BWD: Float[Array, "B W D"],
        tokens_BE: Int[Array, "B E"],
        num_emitted: Int[Array, " B"],
    ) -> Any:
        return self.base.observe(carry, hidden_BWD, tokens_BE, num_emitted)


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
