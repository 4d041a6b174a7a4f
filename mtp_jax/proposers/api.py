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
from mtp_jax.models.bound import BoundModel, Rows

DraftKV = tuple[LayerKV, ...]


@struct.dataclass
class PrefillChunk:
    """One prefill launch as a proposer sees it: Y slots, T tokens each.

    `features_YTJ` is what the drafter is fed of each row. `tokens_YX` goes on past the chunk by `lookahead` tokens;
    entries at or past `num_known` mean nothing.
    """

    features_YTJ: Float[Array, "Y T J"]
    tokens_YX: Int[Array, "Y X"]  # X = T + lookahead
    start: Int[Array, " Y"]
    is_first: Bool[Array, " Y"]  # the slot's first chunk; what lies before it was filled by another request
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

    def prefill(self, model: BoundModel, carry: Any, draft_kv: DraftKV, chunk: PrefillChunk) -> tuple[Any, DraftKV]:
        """Takes a prompt chunk in: drafter entries below its end, and the carry of its last positions."""
        ...

    def finish_prefill(self, carry: Any, pending_token_Y: Int[Array, " Y"], is_last_Y: Bool[Array, " Y"]) -> Any:
        """The carry once the prompt's first output token is known."""
        ...

    def propose(
        self, model: BoundModel, carry: Any, draft_kv: DraftKV, slots: SlotView, *, draft_len: int
    ) -> tuple[Drafts, Any, DraftKV]:
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


@runtime_checkable
class RecursiveDrafter(DraftProposer, Protocol):
    """A proposer that drafts by applying the same layers to its own drafts: what a tree of drafts can be built on.

    Its entry for the token at position i + 1 is at position i. Hidden states come in pairs: one for `draft_logits`, one
    to go on from.
    """

    def catch_up(self, model: BoundModel, carry: Any, draft_kv: DraftKV, slots: SlotView) -> DraftKV:
        """The drafter's pages with the entries of all committed positions."""
        ...

    def begin(
        self, model: BoundModel, carry: Any, draft_kv: DraftKV, slots: SlotView
    ) -> tuple[Float[Array, "B 1 D"], Float[Array, "B 1 D"], DraftKV]:
        """After `catch_up`: hidden states of the row that speaks of the first draft."""
        ...

    def extend(
        self,
        model: BoundModel,
        draft_kv: DraftKV,
        tokens_BW: Int[Array, "B W"],
        hidden_BWD: Float[Array, "B W D"],
        rows: Rows,
    ) -> tuple[Float[Array, "B W D"], Float[Array, "B W D"], DraftKV]:
        """Takes drafts in, each with the hidden state it was drawn from: hidden states of the rows that follow them."""
        ...

    def draft_logits(self, model: BoundModel, hidden_BWD: Float[Array, "b W D"]) -> Float[Array, "B W v"]:
        """Of the drafts that follow, as those of `BoundModel.draft_unembed`."""
        ...
