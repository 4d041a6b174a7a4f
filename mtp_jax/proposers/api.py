"""What a draft proposer must provide, and the rules that keep drafting exact.

A proposer carries *features* across steps, never proposals: drafts are born and consumed inside one step. Rules:
- the carry keeps structure, shape and dtype for every draft length, 0 included; leaves are slot-major [B, ...];
- every step brings the drafter's own KV up to the committed tokens, whatever the draft length, so it has no holes;
- slots that are not live are left untouched.
"""

from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.core.types import Drafts, KVSpec, LayerKV, SlotView
from mtp_jax.models.api import ModelFamily
from mtp_jax.models.bound import BoundModel


@struct.dataclass
class PrefillChunk:
    """One prefill launch as a proposer sees it: Y slots, T tokens each.

    `features_YTJ` is what the drafter is fed of each row. `tokens_YX` goes on past the chunk by `lookahead` tokens;
    entries at or past `num_known` mean nothing.
    """

    features_YTJ: Float[Array, "Y T J"]
    tokens_YX: Int[Array, "Y X"]  # X = T + lookahead
    start: Int[Array, " Y"]
    num_tokens: Int[Array, " Y"]
    num_known: Int[Array, " Y"]
    live: Bool[Array, " Y"]
    page_table_YP: Int[Array, "Y P"]


@runtime_checkable
class DraftProposer(Protocol):
    """A way to draft. Implementations are frozen, hashable dataclasses."""

    @property
    def lookahead(self) -> int:
        """Tokens past a prefill chunk that the drafter's own layers take in."""
        ...

    def draft_kv_specs(self, family: ModelFamily) -> tuple[KVSpec, ...]:
        """Pages the drafter keeps, one entry a layer."""
        ...

    def init_carry(self, family: ModelFamily, *, num_slots: int, max_draft_len: int, dtype: jnp.dtype) -> Any:
        """The carry of `num_slots` empty slots."""
        ...

    def prefill(
        self, model: BoundModel, carry: Any, draft_kv: tuple[LayerKV, ...], chunk: PrefillChunk
    ) -> tuple[Any, tuple[LayerKV, ...]]:
        """Takes a prompt chunk in: drafter entries below its end, and the carry of its last positions."""
        ...

    def finish_prefill(self, carry: Any, pending_token_Y: Int[Array, " Y"], is_last_Y: Bool[Array, " Y"]) -> Any:
        """The carry once the prompt's first output token is known."""
        ...

    def propose(
        self, model: BoundModel, carry: Any, draft_kv: tuple[LayerKV, ...], slots: SlotView, *, draft_len: int
    ) -> tuple[Drafts, Any, tuple[LayerKV, ...]]:
        """Catches the drafter's KV up with the committed tokens, then drafts `draft_len` tokens a slot."""
        ...

    def observe(
        self,
        carry: Any,
        hidden_BWD: Float[Array, "B W D"],
        tokens_BE: Int[Array, "B E"],
        num_emitted: Int[Array, " B"],
    ) -> Any:
        """The carry after commit: features and tokens of the positions that became final."""
        ...
