"""A family joined with its weights, the mesh and the attention backend, for the length of one trace."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Bool, Float, Int, UInt32

from mtp_jax.core.types import LayerKV
from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.models.shortlist import drafting_weights, shortlist_ids
from mtp_jax.models.with_drafter import WithDrafter
from mtp_jax.ops.attention import PagedAttend
from mtp_jax.ops.kv_cache import row_positions
from mtp_jax.ops.sharding import NO_PARALLEL, Parallel


@dataclass(frozen=True)
class TreeRows:
    """Rows that are not one after the other: row w is the `first_row + w`-th of its tree, and is stored as such.

    Its position in the text is `base_len + depth_BW[w]`; it attends what is before the base and the rows of its bits.
    """

    depth_BW: Int[Array, "B W"]
    ancestor_bits_BW: UInt32[Array, "B W"]
    first_row: int = 0


@dataclass(frozen=True)
class Rows:
    """Which rows a forward pass runs: row w of slot b sits at position `base_len[b] + w`, unless `tree` says otherwise.

    `may_write_BW` false marks padding rows: their keys go to the null page and their results mean nothing.
    """

    base_len: Int[Array, " B"]
    live: Bool[Array, " B"]
    may_write_BW: Bool[Array, "B W"]
    page_table_BP: Int[Array, "B P"]
    tree: TreeRows | None = None

    def positions(self, num_rows: int) -> Int[Array, "B W"]:
        """Where the rows are in the text: what rotary embeddings go by."""
        if self.tree is None:
            return row_positions(self.base_len, num_rows)
        return self.base_len[:, None] + self.tree.depth_BW


@dataclass(frozen=True)
class BoundModel:
    """What proposers and steps see of a model. Built inside a trace; holds traced weights."""

    family: ModelFamily
    weights: Weights
    attention_backend: str
    parallel: Parallel = NO_PARALLEL
    debug: bool = False

    def _attend(self, rows: Rows) -> PagedAttend:
        return PagedAttend(
            page_table_BP=rows.page_table_BP,
            base_len=rows.base_len,
            live=rows.live,
            may_write_BW=rows.may_write_BW,
            backend=self.attention_backend,
            ancestor_bits_BW=None if rows.tree is None else rows.tree.ancestor_bits_BW,
            first_row=0 if rows.tree is None else rows.tree.first_row,
            debug=self.debug,
        )

    def target(
        self, tokens_BW: Int[Array, "B W"], rows: Rows, kv: tuple[LayerKV, ...]
    ) -> tuple[Float[Array, "B W D"], Float[Array, "B W J"], tuple[LayerKV, ...]]:
        """Target hidden states of the rows, what a drafter is fed of each, and the pages with the rows in them.

        MTP layers are fed with the hidden state itself, a drafter of its own with its features.
        """
        positions_BW = rows.positions(tokens_BW.shape[1])
        given = (self.weights, tokens_BW, positions_BW, kv, self._attend(rows), self.parallel)
        if isinstance(self.family, WithDrafter):
            return self.family.forward_with_features(*given)
        hidden_BWD, kv = self.family.forward(*given)
        return hidden_BWD, hidden_BWD, kv

    def unembed(self, hidden_BWD: Float[Array, "b W D"]) -> Float[Array, "B W v"]:
        """The target's float32 logits: on a mesh of the slots of all data shards, over this device's vocabulary."""
        return self.family.unembed(self.weights, self.parallel.gather_slots(hidden_BWD), self.parallel)

    def draft(
        self,
        depth: int,
        tokens_BW: Int[Array, "B W"],
        hidden_BWD: Float[Array, "B W D"],
        rows: Rows,
        draft_kv: tuple[LayerKV, ...],
    ) -> tuple[Float[Array, "B W D"], Float[Array, "B W D"], tuple[LayerKV, ...]]:
        """MTP layer `depth` over the rows: (hidden for `draft_unembed`, hidden to recycle, pages)."""
        positions_BW = rows.positions(tokens_BW.shape[1])
        head_BWD, recycled_BWD, layer_kv = self.family.draft_forward(
            self.weights, depth, tokens_BW, hidden_BWD, positions_BW, draft_kv[depth], self._attend(rows), self.parallel
        )
        return head_BWD, recycled_BWD, _replaced(draft_kv, depth, layer_kv)

    @property
    def draft_ids(self) -> Int[Array, " N"] | None:
        """The token of each column of `draft_unembed`; None: column and token are the same."""
        if isinstance(self.family, WithDrafter):
            return self.family.draft_ids(self.weights)
        return shortlist_ids(self.weights)

    def draft_unembed(self, depth: int, hidden_BWD: Float[Array, "b W D"]) -> Float[Array, "B W v"]:
        """MTP layer `depth`'s float32 logits, on a mesh as those of `unembed`; of the shortlist, if there is one."""
        weights = drafting_weights(self.family, self.weights)
        return self.family.draft_unembed(weights, depth, self.parallel.gather_slots(hidden_BWD), self.parallel)


def _replaced(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])
