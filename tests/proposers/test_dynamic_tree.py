"""Trees of drafts over a real MTP layer: one branch is the chain, more nodes only add, siblings are alone."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.core.config import SamplingParams
from mtp_jax.core.topology import Tree
from mtp_jax.core.types import Drafts, LayerKV, SlotView
from mtp_jax.models.bound import BoundModel, Rows
from mtp_jax.ops.kv_cache import init_kv
from mtp_jax.proposers.api import DraftProposer, PrefillChunk
from mtp_jax.proposers.dynamic_tree import DynamicTree
from mtp_jax.proposers.mtp import mtp_eagle
from mtp_jax.testing.engines import without_optimizations
from mtp_jax.testing.rows import sampling_rows, slot_view
from tests.models.support import Golden

PROMPT_LEN, PAGE_SIZE, PAGES_PER_SLOT, KMAX = 9, 4, 8, 3
SAMPLING = sampling_rows(
    SamplingParams(temperature=0), SamplingParams(temperature=0.8), SamplingParams(temperature=1.5)
)
NUM_SLOTS = 3
PAGE_TABLE = 1 + np.arange(NUM_SLOTS * PAGES_PER_SLOT, dtype=np.int32).reshape(NUM_SLOTS, PAGES_PER_SLOT)


class Started(NamedTuple):
    """A model after a prompt: what a proposer's first step sees."""

    model: BoundModel
    carry: Any
    draft_kv: tuple[LayerKV, ...]
    slots: SlotView


@functools.cache
def started() -> Started:
    golden = Golden.load("glm4_moe_tiny")
    model = BoundModel(golden.family, golden.weights, "reference")
    base, vocab_size = mtp_eagle(), golden.family.vocab_size
    pools = {"num_pages": PAGE_TABLE.size, "page_size": PAGE_SIZE, "dtype": jnp.dtype("float32")}
    tokens = np.random.default_rng(0).integers(0, vocab_size, (NUM_SLOTS, PROMPT_LEN + 1)).astype(np.int32)

    @jax.jit
    def prefill(kv: Any, carry: Any, draft_kv: Any) -> tuple[Any, Any]:
        length = jnp.full((NUM_SLOTS,), PROMPT_LEN, jnp.int32)
        live = jnp.ones((NUM_SLOTS,), bool)
        table = jnp.asarray(PAGE_TABLE)
        rows = Rows(length * 0, live, jnp.ones((NUM_SLOTS, PROMPT_LEN), bool), table)
        _, features_YTJ, _ = model.target(jnp.asarray(tokens[:, :-1]), rows, kv)
        chunk = PrefillChunk(features_YTJ, jnp.asarray(tokens), length * 0, live, length, length, live, table)
        carry, draft_kv = base.prefill(model, carry, draft_kv, chunk)
        return base.finish_prefill(carry, jnp.asarray(tokens[:, -1]), live), draft_kv

    carry = base.init_carry(golden.family, num_slots=NUM_SLOTS, max_draft_len=KMAX, dtype=jnp.dtype("float32"))
    kv, draft_kv = init_kv(golden.family.kv_specs(), **pools), init_kv(base.draft_kv_specs(golden.family), **pools)
    carry, draft_kv = without_optimizations(lambda: prefill(kv, carry, draft_kv))
    slots = slot_view(
        SAMPLING,
        vocab_size=vocab_size,
        draft_len=KMAX,
        committed_len=[PROMPT_LEN] * NUM_SLOTS,
        pending_token=jnp.asarray(tokens[:, -1]),
        num_positions=jnp.full((NUM_SLOTS,), 16),
        page_table_BP=jnp.asarray(PAGE_TABLE),
    )
    return Started(model, carry, draft_kv, slots)


@functools.cache
def proposed(proposer: DraftProposer) -> tuple[Drafts, tuple[LayerKV, ...]]:
    model, carry, draft_kv, slots = started()

    @jax.jit
    def propose(carry: Any, draft_kv: Any, slots: SlotView) -> tuple[Drafts, Any]:
        drafts, _, draft_kv = proposer.propose(model, carry, draft_kv, slots, draft_len=KMAX)
        return drafts, draft_kv

    return without_optimizations(lambda: propose(carry, draft_kv, slots))


def test_a_tree_of_one_branch_is_the_chain_bit_for_bit() -> None:
    """Greedy and sampled slots: the same drafts, and the same entries in the drafter's cache."""
    chain, chain_kv = proposed(mtp_eagle())
    tree, tree_kv = proposed(DynamicTree(mtp_eagle(), Tree(KMAX, 1, KMAX)))
    np.testing.assert_array_equal(tree.tokens_BK, chain.tokens_BK)
    np.testing.assert_array_equal(tree.parent_BK, [[0, 1, 2]] * NUM_SLOTS)
    assert len({tuple(row) for row in np.asarray(chain.tokens_BK).tolist()}) == NUM_SLOTS
    for tree_pages, chain_pages in zip(jax.tree.leaves(tree_kv), jax.tree.leaves(chain_kv), strict=True):
        np.testing.assert_array_equal(tree_pages, chain_pages)


def test_a_smaller_tree_is_the_beginning_of_a_larger_one() -> None:
    """So a superset never accepts less: whatever path is right in the smaller one is in the larger one too."""
    smaller, _ = proposed(DynamicTree(mtp_eagle(), Tree(KMAX, 3, 5)))
    larger, _ = proposed(DynamicTree(mtp_eagle(), Tree(KMAX, 3, 12)))
    np.testing.assert_array_equal(smaller.tokens_BK, larger.tokens_BK[:, :5])
    parents = np.asarray(larger.parent_BK)
    np.testing.assert_array_equal(smaller.parent_BK, parents[:, :5])
    assert (parents <= np.arange(12)).all()
    assert parents.max() > 0


def test_the_first_of_a_levels_nodes_are_the_chain() -> None:
    """The likeliest path by choice after choice is in the tree, as far as its nodes are among the best."""
    chain, _ = proposed(mtp_eagle())
    tree, _ = proposed(DynamicTree(mtp_eagle(), Tree(KMAX, 3, 12)))
    for slot in range(NUM_SLOTS):
        parents, tokens = np.asarray(tree.parent_BK)[slot], np.asarray(tree.tokens_BK)[slot]
        row = 0
        for draft in np.asarray(chain.tokens_BK)[slot]:
            children = [child + 1 for child in np.flatnonzero(parents == row)]
            if not children:
                break
            row = children[0]  # of siblings the likeliest comes first
            assert tokens[row - 1] == draft
