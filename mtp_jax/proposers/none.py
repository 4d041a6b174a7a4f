"""No drafting: plain decoding, in the same step as everything else."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.core.types import Drafts, KVSpec, LayerKV, SlotView
from mtp_jax.models.api import ModelFamily
from mtp_jax.models.bound import BoundModel
from mtp_jax.proposers.api import PrefillChunk


@dataclass(frozen=True)
class NoDraft:
    """Proposes nothing and keeps nothing."""

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
        draft_kv: tuple[LayerKV, ...],
        chunk: PrefillChunk,  # noqa: ARG002
    ) -> tuple[Any, tuple[LayerKV, ...]]:
        return carry, draft_kv

    def finish_prefill(self, carry: Any, pending_token_Y: Int[Array, " Y"], is_last_Y: Bool[Array, " Y"]) -> Any:  # noqa: ARG002
        return carry

    def propose(
        self,
        model: BoundModel,  # noqa: ARG002
        carry: Any,
        draft_kv: tuple[LayerKV, ...],
        slots: SlotView,
        *,
        draft_len: int,  # noqa: ARG002
    ) -> tuple[Drafts, Any, tuple[LayerKV, ...]]:
        return no_drafts(slots), carry, draft_kv

    def observe(
        self,
        carry: Any,
        hidden_BWD: Float[Array, "B W D"],  # noqa: ARG002
        tokens_BE: Int[Array, "B E"],  # noqa: ARG002
        num_emitted: Int[Array, " B"],  # noqa: ARG002
    ) -> Any:
        return carry


def no_drafts(slots: SlotView) -> Drafts:
    """Zero drafts for every slot."""
    return Drafts(tokens_BK=jnp.zeros((slots.live.shape[0], 0), jnp.int32))
