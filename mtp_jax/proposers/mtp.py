"""Drafting with a model's own MTP layers: one layer applied recursively, or one layer per draft position.

Both catch up first: the entries of the positions that became final in earlier steps are written from the target's own
hidden states (entries made while drafting are provisional: they came from recycled hidden states). The entry at
position i pairs the hidden state of i with token i + 1, and speaks of token i + 2. With the pending token at position c
the last entry that can be made is c - 1; draft j (1-based, the token at position c + j) comes out of
- recursive: the one layer at position c + j - 2 (highest entry written: c + K - 2);
- one per position: layer j at position c - 1, its token inputs shifted by j.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from mtp_jax.core.config import SpeculativeConfig
from mtp_jax.core.types import Drafts, KVSpec, SlotView
from mtp_jax.models.api import ModelFamily
from mtp_jax.models.bound import BoundModel, Rows
from mtp_jax.proposers.api import DraftKV, PrefillChunk
from mtp_jax.proposers.drawing import DraftSampling, draft_sampling_of, with_next_draft
from mtp_jax.proposers.features import Features, empty_features, roll_features, select_slots
from mtp_jax.proposers.method import Method
from mtp_jax.proposers.none import no_drafts


@runtime_checkable
class DraftChain(Protocol):
    """The part in which the ways to draft differ: catches the layers' KV up, then drafts `draft_len` tokens a slot."""

    def __call__(
        self, proposer: "Mtp", model: BoundModel, carry: Features, draft_kv: DraftKV, slots: SlotView, draft_len: int
    ) -> tuple[Drafts, DraftKV]: ...


CarriedWidth = Callable[[ModelFamily], int]
"""How wide the hidden states are that travel between steps."""


def _hidden_size(family: ModelFamily) -> int:
    return family.hidden_size


@dataclass(frozen=True)
class Mtp:
    """Drafting with the first `num_layers` MTP layers of a model, by `chain`: see `mtp_eagle` and `mtp_vanilla`."""

    num_layers: int
    chain: DraftChain
    draft_sampling: DraftSampling = "coupled"
    carried_width: CarriedWidth = _hidden_size

    @property
    def lookahead(self) -> int:
        return self.num_layers

    def draft_kv_specs(self, family: ModelFamily) -> tuple[KVSpec, ...]:
        return family.draft_kv_specs()[: self.num_layers]

    def init_carry(self, family: ModelFamily, *, num_slots: int, max_draft_len: int, dtype: jnp.dtype) -> Features:
        return empty_features(num_slots, max_draft_len + self.num_layers, self.carried_width(family), dtype)

    def prefill(
        self, model: BoundModel, carry: Features, draft_kv: DraftKV, chunk: PrefillChunk
    ) -> tuple[Features, DraftKV]:
        """Entries of a prompt chunk in every layer, as far as their tokens are known.

        Layer d (0-based) at position i takes token i + 1 + d. Entries whose token is not in the prompt are left to the
        first decode step, whose carried rows reach `num_layers` positions back.
        """
        num_rows = chunk.features_YTJ.shape[1]
        row = jnp.arange(num_rows, dtype=jnp.int32)[None, :]
        hidden_YTD = chunk.features_YTJ
        for depth in range(self.num_layers):
            is_known = (chunk.start[:, None] + row + 1 + depth < chunk.num_known[:, None]) & (
                row < chunk.num_tokens[:, None]
            )
            rows = Rows(chunk.start, chunk.live, is_known, chunk.page_table_YP)
            tokens_YT = chunk.tokens_YX[:, 1 + depth : 1 + depth + num_rows]
            _, recycled_YTD, draft_kv = model.draft(depth, tokens_YT, hidden_YTD, rows, draft_kv)
            hidden_YTD = recycled_YTD if model.family.chains_mtp_layers else hidden_YTD
        started = replace(carry, num_fresh=jnp.where(chunk.is_first, 0, carry.num_fresh))
        keep = jnp.full_like(chunk.num_tokens, self.num_layers)
        rolled = roll_features(
            started, chunk.features_YTJ, chunk.tokens_YX[:, 1 : 1 + num_rows], chunk.num_tokens, keep
        )
        return select_slots(chunk.live, rolled, carry), draft_kv

    def finish_prefill(
        self, carry: Features, pending_token_Y: Int[Array, " Y"], is_last_Y: Bool[Array, " Y"]
    ) -> Features:
        slot_index = jnp.arange(pending_token_Y.shape[0])
        last = jnp.maximum(carry.num_fresh - 1, 0)
        tokens_BF = carry.tokens_BF.at[slot_index, last].set(pending_token_Y)
        return select_slots(is_last_Y, replace(carry, tokens_BF=tokens_BF), carry)

    def propose(
        self, model: BoundModel, carry: Features, draft_kv: DraftKV, slots: SlotView, *, draft_len: int
    ) -> tuple[Drafts, Features, DraftKV]:
        drafts, draft_kv = self.chain(self, model, carry, draft_kv, slots, draft_len)
        return drafts, carry, draft_kv

    def catch_up(self, model: BoundModel, carry: Features, draft_kv: DraftKV, slots: SlotView) -> DraftKV:
        """Entries of the positions that became final, in the first layer."""
        rows = _fresh_rows(carry, slots, num_known=carry.num_fresh)
        _, _, draft_kv = model.draft(0, carry.tokens_BF, carry.hidden_BFD, rows, draft_kv)
        return draft_kv

    def begin(
        self, model: BoundModel, carry: Features, draft_kv: DraftKV, slots: SlotView
    ) -> tuple[Float[Array, "B 1 D"], Float[Array, "B 1 D"], DraftKV]:
        """The last fresh row through the whole first layer.

        It alone speaks: of the rows of `catch_up` no more than their keys is used, and the compiler drops the rest: one
        row's attention and experts instead of Kmax + 1.
        """
        last_entry = Rows(
            base_len=jnp.where(slots.live, slots.committed_len - 1, 0),
            live=slots.live,
            may_write_BW=slots.live[:, None],
            page_table_BP=slots.page_table_BP,
        )
        return model.draft(
            0, _last_row(carry.tokens_BF, carry), _last_row(carry.hidden_BFD, carry), last_entry, draft_kv
        )

    def extend(
        self,
        model: BoundModel,
        draft_kv: DraftKV,
        tokens_BW: Int[Array, "B W"],
        hidden_BWD: Float[Array, "B W D"],
        rows: Rows,
    ) -> tuple[Float[Array, "B W D"], Float[Array, "B W D"], DraftKV]:
        return model.draft(0, tokens_BW, hidden_BWD, rows, draft_kv)

    def draft_logits(self, model: BoundModel, hidden_BWD: Float[Array, "b W D"]) -> Float[Array, "B W v"]:
        return model.draft_unembed(0, hidden_BWD)

    def observe(
        self,
        carry: Features,
        hidden_BWD: Float[Array, "B W D"],
        tokens_BE: Int[Array, "B E"],
        num_emitted: Int[Array, " B"],
    ) -> Features:
        rolled = roll_features(carry, hidden_BWD, tokens_BE, num_emitted, num_emitted + (self.num_layers - 1))
        return select_slots(num_emitted > 0, rolled, carry)


def mtp_eagle(draft_sampling: DraftSampling = "coupled", carried_width: CarriedWidth = _hidden_size) -> Mtp:
    """The first MTP layer applied again and again: any draft length from one layer.

    `carried_width`: of what the layer is fed, where it is not the target's hidden state.

    >>> mtp_eagle("greedy").lookahead  # a prompt's entries look one token ahead of it
    1
    """
    return Mtp(1, _recursive, draft_sampling, carried_width)


def mtp_vanilla(num_layers: int, draft_sampling: DraftSampling = "coupled") -> Mtp:
    """One MTP layer per draft position, each fed by the layer before it: at most `num_layers` drafts.

    >>> mtp_vanilla(3).lookahead
    3
    """
    return Mtp(num_layers, _one_per_position, draft_sampling)


def _recursive(
    proposer: Mtp, model: BoundModel, carry: Features, draft_kv: DraftKV, slots: SlotView, draft_len: int
) -> tuple[Drafts, DraftKV]:
    draft_kv = proposer.catch_up(model, carry, draft_kv, slots)
    if draft_len == 0:
        return no_drafts(slots), draft_kv
    head_BWD, hidden_BWD, draft_kv = proposer.begin(model, carry, draft_kv, slots)
    drafts = no_drafts(slots)
    for j in range(1, draft_len + 1):
        logits_B1V = proposer.draft_logits(model, head_BWD)
        drafts = with_next_draft(drafts, logits_B1V, slots, proposer.draft_sampling, model.parallel, model.draft_ids)
        draft_BW = drafts.tokens_BK[:, -1:]
        if j < draft_len:
            is_drafting = slots.live & (j <= slots.draft_cap)
            entry = Rows(slots.committed_len + (j - 1), slots.live, is_drafting[:, None], slots.page_table_BP)
            head_BWD, hidden_BWD, draft_kv = proposer.extend(model, draft_kv, draft_BW, hidden_BWD, entry)
    return drafts, draft_kv


def _one_per_position(
    proposer: Mtp, model: BoundModel, carry: Features, draft_kv: DraftKV, slots: SlotView, draft_len: int
) -> tuple[Drafts, DraftKV]:
    num_rows = carry.tokens_BF.shape[1]
    tokens_BX = jnp.pad(carry.tokens_BF, ((0, 0), (0, proposer.num_layers)))
    slot_index = jnp.arange(tokens_BX.shape[0])
    hidden_BFD = carry.hidden_BFD
    drafts = no_drafts(slots)
    # Every layer runs whatever the draft length: a layer that is not asked for a draft still keeps its KV whole.
    for depth in range(proposer.num_layers):
        num_known = carry.num_fresh - depth + min(depth, draft_len)
        rows = _fresh_rows(carry, slots, num_known=jnp.minimum(num_known, carry.num_fresh))
        tokens_BF = tokens_BX[:, depth : depth + num_rows]
        head_BFD, recycled_BFD, draft_kv = model.draft(depth, tokens_BF, hidden_BFD, rows, draft_kv)
        hidden_BFD = recycled_BFD if model.family.chains_mtp_layers else hidden_BFD
        if depth < draft_len:
            logits_B1V = model.draft_unembed(depth, _last_row(head_BFD, carry))
            drafts = with_next_draft(
                drafts, logits_B1V, slots, proposer.draft_sampling, model.parallel, model.draft_ids
            )
            next_column = carry.num_fresh + depth
            tokens_BX = tokens_BX.at[slot_index, next_column].set(drafts.tokens_BK[:, -1], mode="drop")
    return drafts, draft_kv


def _fresh_rows(carry: Features, slots: SlotView, num_known: Int[Array, " B"]) -> Rows:
    """The carried rows, the first `num_known` of each slot written, the rest padding."""
    row = jnp.arange(carry.tokens_BF.shape[1], dtype=jnp.int32)[None, :]
    base_len = jnp.where(slots.live, slots.committed_len - carry.num_fresh, 0)
    return Rows(base_len, slots.live, row < num_known[:, None], slots.page_table_BP)


def _last_row(rows_BFx: Shaped[Array, "B F ..."], carry: Features) -> Shaped[Array, "B 1 ..."]:
    last = jnp.maximum(carry.num_fresh - 1, 0)  # a slot that never had a prompt has no row; its result is not used
    return jnp.take_along_axis(rows_BFx, last.reshape(-1, *(1,) * (rows_BFx.ndim - 1)), axis=1)


def lacks_layers(family: ModelFamily, spec: SpeculativeConfig) -> str | None:
    """The sentence for a checkpoint without MTP layers, for methods that draft with them."""
    if family.num_mtp_layers > 0:
        return None
    return (
        f"method {spec.method!r} needs MTP layers and this {family.name} checkpoint has none; "
        "use speculative_config=None for plain decoding."
    )


def _eagle(family: ModelFamily, spec: SpeculativeConfig) -> Mtp:  # noqa: ARG001
    return mtp_eagle(draft_sampling_of(spec))


def _vanilla(family: ModelFamily, spec: SpeculativeConfig) -> Mtp:
    return mtp_vanilla(family.num_mtp_layers, draft_sampling_of(spec))


_OPTIONS = frozenset({"draft_sampling", "draft_vocab_size"})
MTP_EAGLE = Method(_eagle, options=_OPTIONS, problem=lacks_layers)
MTP_VANILLA = Method(_vanilla, options=_OPTIONS, problem=lacks_layers, longest=lambda family: family.num_mtp_layers)
MTP = Method(
    lambda family, spec: (_eagle if family.num_mtp_layers == 1 else _vanilla)(family, spec),
    options=_OPTIONS,
    problem=lacks_layers,
    longest=lambda family: family.num_mtp_layers if family.num_mtp_layers > 1 else None,
    stands_for=lambda family: "mtp_eagle" if family.num_mtp_layers == 1 else "mtp_vanilla",
)
"""One layer again and again where the checkpoint has one, else one layer for each draft position."""
