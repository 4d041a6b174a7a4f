"""Proposers without a model of their own: what they draft follows from the slot's text, or is nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.core.types import Drafts, KVSpec, SlotView
from mtp_jax.models.api import ModelFamily
from mtp_jax.models.bound import BoundModel
from mtp_jax.proposers.api import DraftKV, PrefillChunk

DraftText = Callable[[SlotView, int], Drafts]
"""Frozen and hashable, as it is part of a step program."""


@dataclass(frozen=True)
class FromText:
    """Drafts by a function of (slots, draft length), and keeps nothing: no pages, no carry."""

    draft: DraftText

    @property
    def lookahead(self) -> int:
        return 0

    def draft_kv_specs(self, family: ModelFamily) -> tuple[KVSpec, ...]:  # noqa: ARG002
        return ()

    def init_carry(self, family: ModelFamily, *, num_slots: int, max_draft_len: int, dtype: jnp.dtype) -> Any:  # noqa: ARG002
        return ()

    def prefill(
        self,
        model: BoundModel,  # noqa: ARG002
        carry: Any,
        draft_kv: DraftKV,
        chunk: PrefillChunk,  # noqa: ARG002
    ) -> tuple[Any, DraftKV]:
        return carry, draft_kv

    def finish_prefill(self, carry: Any, pending_token_Y: Int[Array, " Y"], is_last_Y: Bool[Array, " Y"]) -> Any:  # noqa: ARG002
        return carry

    def propose(
        self,
        model: BoundModel,  # noqa: ARG002
        carry: Any,
        draft_kv: DraftKV,
        slots: SlotView,
        *,
        draft_len: int,
    ) -> tuple[Drafts, Any, DraftKV]:
        return self.draft(slots, draft_len), carry, draft_kv

    def observe(
        self,
        carry: Any,
        hidden_BWD: Float[Array, "B W D"],  # noqa: ARG002
        tokens_BE: Int[Array, "B E"],  # noqa: ARG002
        num_emitted: Int[Array, " B"],  # noqa: ARG002
    ) -> Any:
        return carry
