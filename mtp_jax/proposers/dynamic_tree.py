"""A tree of drafts over any recursive drafter: several continuations of a node, the best nodes of all are verified.

Level by level the `topk` likeliest continuations of each node of the frontier are scored, and the `topk` best of the
level are the next frontier. At the end the best `nodes` of all that were scored are the drafts.

The score of a node is the product of the chances along its path: the drafter's estimate of how likely it is that the
target goes this way. A chance is the draft's probability at temperature 0 or for "greedy" drafts; for "coupled" ones it
takes the noise of the position into account, which the target will use too (`ops.continuations.likeliest_tokens`). So
the likeliest token under the noise ranks first among its siblings, and with `topk=1` the tree is the drafter's chain.
A child's score is at most its parent's, and of equals the one that was scored first comes first: parents before
children, whatever prefix of the drafts is taken. Children of a node that had no position to be written at score zero.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from mtp_jax.core.config import SpeculativeConfig
from mtp_jax.core.errors import InvariantError
from mtp_jax.core.topology import Tree
from mtp_jax.core.types import Drafts, SlotView
from mtp_jax.models.api import ModelFamily
from mtp_jax.models.bound import BoundModel, Rows, TreeRows
from mtp_jax.models.with_drafter import WithDrafter
from mtp_jax.ops.continuations import likeliest_greedy_tokens, likeliest_tokens
from mtp_jax.ops.row_text import text_of
from mtp_jax.ops.trees import is_ancestor, row_bit
from mtp_jax.proposers.api import DraftKV, RecursiveDrafter
from mtp_jax.proposers.drawing import DraftSampling, draft_sampling_of
from mtp_jax.proposers.eagle3 import eagle3
from mtp_jax.proposers.method import Method
from mtp_jax.proposers.mtp import lacks_layers, mtp_eagle
from mtp_jax.proposers.none import no_drafts
from mtp_jax.proposers.over_base import OverBase

_ROOT = -1


@dataclass(frozen=True)
class _Scored:
    """Continuations, all that were scored so far, level by level."""

    tokens_BN: Int[Array, "B N"]
    log_score_BN: Float[Array, "B N"]
    parent_BN: Int[Array, "B N"]  # place in this very list, or `_ROOT`

    def joined(self, more: "_Scored") -> "_Scored":
        parts = zip(vars(self).values(), vars(more).values(), strict=True)
        return _Scored(*(jnp.concatenate(part, axis=1) for part in parts))


@dataclass(frozen=True)
class _Frontier:
    """The nodes of a level that go on; `bits_BF` are the drafter's rows on the way to each, its own included."""

    place_BF: Int[Array, "B F"]  # among the scored ones
    log_score_BF: Float[Array, "B F"]
    bits_BF: UInt32[Array, "B F"]
    is_written_BF: Bool[Array, "B F"]
    head_BFD: Float[Array, "B F D"]
    hidden_BFD: Float[Array, "B F D"]


@dataclass(frozen=True)
class DynamicTree(OverBase):
    """Trees of `shape` out of the drafts of `base`. See the module."""

    base: RecursiveDrafter
    shape: Tree
    draft_sampling: DraftSampling = "coupled"

    def propose(
        self, model: BoundModel, carry: Any, draft_kv: DraftKV, slots: SlotView, *, draft_len: int
    ) -> tuple[Drafts, Any, DraftKV]:
        draft_kv = self.base.catch_up(model, carry, draft_kv, slots)
        if draft_len == 0:
            return no_drafts(slots), carry, draft_kv
        head_B1D, hidden_B1D, draft_kv = self.base.begin(model, carry, draft_kv, slots)
        frontier = _root(head_B1D, hidden_B1D)
        row_tokens_BX = no_drafts(slots).tokens_BK  # what the drafter took in: its row x is the x-th
        scored = self._continuations(model, slots, frontier, row_tokens_BX, level=0)
        for level in range(1, draft_len):
            frontier, tokens_BF, draft_kv = self._go_on(model, draft_kv, slots, frontier, scored, level)
            row_tokens_BX = jnp.concatenate([row_tokens_BX, tokens_BF], axis=1)
            scored = scored.joined(self._continuations(model, slots, frontier, row_tokens_BX, level))
        return _best(scored, self.shape.num_drafts(draft_len)), carry, draft_kv

    def _continuations(
        self, model: BoundModel, slots: SlotView, frontier: _Frontier, row_tokens_BX: Int[Array, "B X"], level: int
    ) -> _Scored:
        """The likeliest tokens after each node of the frontier: those at position committed_len + level + 1."""
        topk, num_nodes = self.shape.topk, frontier.place_BF.shape[1]
        logits_BFV, ids_N = self.base.draft_logits(model, frontier.head_BFD), model.draft_ids
        if self.draft_sampling == "greedy":
            tokens_BFk, chances_BFk = likeliest_greedy_tokens(logits_BFV, topk, model.parallel, ids_N)
        else:
            noise_B1V = slots.noise_BWV[:, level : level + 1]
            noise_BFV = jnp.broadcast_to(noise_B1V, (*frontier.place_BF.shape, noise_B1V.shape[2]))
            text = text_of(slots, row_tokens_BX, is_ancestor(frontier.bits_BF, row_tokens_BX.shape[1]))
            tokens_BFk, chances_BFk = likeliest_tokens(
                logits_BFV, noise_BFV, slots.sampling, text, topk, model.parallel, ids_N
            )
        log_score_BFk = frontier.log_score_BF[..., None] + chances_BFk
        log_score_BFk = jnp.where(frontier.is_written_BF[..., None], log_score_BFk, -jnp.inf)
        flat = (-1, num_nodes * topk)
        return _Scored(
            tokens_BFk.reshape(flat), log_score_BFk.reshape(flat), jnp.repeat(frontier.place_BF, topk, axis=1)
        )

    def _go_on(
        self, model: BoundModel, draft_kv: DraftKV, slots: SlotView, before: _Frontier, scored: _Scored, level: int
    ) -> tuple[_Frontier, Int[Array, "B F"], DraftKV]:
        """The best of the last level, taken in by the drafter: the next frontier, and its tokens."""
        topk = self.shape.topk
        num_last = before.place_BF.shape[1] * topk
        num_earlier = scored.tokens_BN.shape[1] - num_last
        log_score_BF, best_BF = lax.top_k(scored.log_score_BN[:, num_earlier:], topk)
        tokens_BF = jnp.take_along_axis(scored.tokens_BN[:, num_earlier:], best_BF, axis=1)
        parent_BF = best_BF // topk
        first_row = (level - 1) * topk
        row_1F = first_row + jnp.arange(topk, dtype=jnp.int32)[None, :]
        bits_BF = jnp.take_along_axis(before.bits_BF, parent_BF, axis=1) | row_bit(row_1F)
        is_written_BF = row_1F < slots.num_positions[:, None]
        rows = Rows(
            base_len=jnp.where(slots.live, slots.committed_len, 0),
            live=slots.live,
            may_write_BW=is_written_BF,
            page_table_BP=slots.page_table_BP,
            tree=TreeRows(jnp.full_like(tokens_BF, level - 1), bits_BF, first_row),
        )
        hidden_BFD = jnp.take_along_axis(before.hidden_BFD, parent_BF[..., None], axis=1)
        head_BFD, hidden_BFD, draft_kv = self.base.extend(model, draft_kv, tokens_BF, hidden_BFD, rows)
        place_BF = num_earlier + best_BF
        return _Frontier(place_BF, log_score_BF, bits_BF, is_written_BF, head_BFD, hidden_BFD), tokens_BF, draft_kv


def _root(head_B1D: Float[Array, "B 1 D"], hidden_B1D: Float[Array, "B 1 D"]) -> _Frontier:
    """The pending token: it has no row of its own among the drafter's, and a score of one."""
    shape = head_B1D.shape[:2]
    return _Frontier(
        place_BF=jnp.full(shape, _ROOT, jnp.int32),
        log_score_BF=jnp.zeros(shape, jnp.float32),
        bits_BF=jnp.zeros(shape, jnp.uint32),
        is_written_BF=jnp.ones(shape, bool),
        head_BFD=head_B1D,
        hidden_BFD=hidden_B1D,
    )


def _best(scored: _Scored, num_drafts: int) -> Drafts:
    """The drafts with the highest scores, in their order: of equals the first, so a parent is before its children."""
    _, place_BK = lax.top_k(scored.log_score_BN, num_drafts)
    parent_place_BK = jnp.take_along_axis(scored.parent_BN, place_BK, axis=1)
    is_parent_BKK = parent_place_BK[:, :, None] == place_BK[:, None, :]
    is_after_root_BK = parent_place_BK == _ROOT
    return Drafts(
        tokens_BK=jnp.take_along_axis(scored.tokens_BN, place_BK, axis=1),
        parent_BK=jnp.where(is_after_root_BK, 0, 1 + jnp.argmax(is_parent_BKK, axis=2).astype(jnp.int32)),
    )


def _build(family: ModelFamily, spec: SpeculativeConfig) -> DynamicTree:
    """Over the model's drafter or, without one, over its first MTP layer, applied again and again."""
    if not isinstance(spec.topology, Tree):
        raise InvariantError(f"method {spec.method!r} without a tree")
    sampling = draft_sampling_of(spec)
    base = eagle3(sampling) if isinstance(family, WithDrafter) else mtp_eagle(sampling)
    return DynamicTree(base, spec.topology, sampling)


def _problem(family: ModelFamily, spec: SpeculativeConfig) -> str | None:
    num_tokens = spec.draft_vocab_size or family.vocab_size
    if isinstance(family, WithDrafter):
        num_tokens = family.drafter.draft_vocab_size
        if spec.draft_vocab_size is not None:
            return (
                f"draft_vocab_size is {spec.draft_vocab_size}, and the drafter has a vocabulary of its own; leave it "
                "out."
            )
    elif (problem := lacks_layers(family, spec)) is not None:
        return problem
    if isinstance(spec.topology, Tree) and spec.topology.topk > num_tokens:
        return f"tree_topk is {spec.topology.topk}; there are {num_tokens} tokens to draft."
    return None


def _caveat(family: ModelFamily, spec: SpeculativeConfig) -> str | None:
    if family.num_mtp_layers < 2:
        return None
    return (
        f"method {spec.method!r} drafts with the first of the checkpoint's {family.num_mtp_layers} MTP layers, applied "
        "again and again; the others are not used."
    )


DYNAMIC_TREE = Method(
    _build,
    options=frozenset({"draft_sampling", "draft_vocab_size", "model", "tree_topk", "tree_nodes"}),
    problem=_problem,
    caveat=_caveat,
)
