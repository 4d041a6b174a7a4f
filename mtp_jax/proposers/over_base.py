"""What proposers share that change another one's drafts and leave its pages and its carry to it."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.core.types import KVSpec, LayerKV
from mtp_jax.models.api import ModelFamily
from mtp_jax.models.bound import BoundModel
from mtp_jax.proposers.api import DraftProposer, PrefillChunk


@dataclass(frozen=True)
class OverBase:
    """All of a `DraftProposer` but `propose`, as `base` does it."""

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

    def observe(
        self,
        carry: Any,
        hidden_BWD: Float[Array, "B W D"],
        tokens_BE: Int[Array, "B E"],
        num_emitted: Int[Array, " B"],
    ) -> Any:
        return self.base.observe(carry, hidden_BWD, tokens_BE, num_emitted)
