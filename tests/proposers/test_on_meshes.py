"""Proposers draft on a mesh what they draft on one device: caches, carries and vocabularies split over 2 x 2."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jaxtyping import Array

from mtp_jax.core.config import SamplingParams
from mtp_jax.core.topology import Tree
from mtp_jax.core.types import Drafts, KVSpec, Needs, SamplingRows, SlotView
from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.models.bound import BoundModel, Rows
from mtp_jax.models.sharding import weight_specs
from mtp_jax.ops.kv_cache import init_kv
from mtp_jax.ops.placement import AxisRules
from mtp_jax.ops.sharding import NO_PARALLEL, Parallel
from mtp_jax.proposers.api import DraftProposer, PrefillChunk
from mtp_jax.proposers.dynamic_tree import DynamicTree
from mtp_jax.proposers.eagle3 import eagle3
from mtp_jax.proposers.mtp import mtp_vanilla
from mtp_jax.testing.engines import without_optimizations
from mtp_jax.testing.rows import sampling_rows, slot_view
from mtp_jax.testing.toy_family import ToyFamily
from tests.models.tiny_eagle3 import tiny_eagle3

NUM_SHARDS, SLOTS_PER_SHARD, PROMPT_LEN, DRAFT_LEN, PAGE_SIZE, PAGES_PER_SLOT = 2, 2, 5, 2, 4, 4
NUM_SLOTS = NUM_SHARDS * SLOTS_PER_SHARD
POOLS: dict[str, Any] = {
    "num_pages": SLOTS_PER_SHARD * PAGES_PER_SLOT,
    "page_size": PAGE_SIZE,
    "dtype": jnp.dtype("float32"),
}
AXES = Parallel(data="data", model="model")
EAGLE3 = tiny_eagle3()
CASES: dict[str, tuple[DraftProposer, ModelFamily]] = {
    "a layer for each draft": (mtp_vanilla(2), ToyFamily(vocab_size=16, num_mtp_layers=2)),
    "eagle3": (eagle3(), EAGLE3),
    "a tree over eagle3": (DynamicTree(eagle3(), Tree(DRAFT_LEN, 2, 4)), EAGLE3),
    "a tree over eagle3, argmax drafts": (DynamicTree(eagle3(), Tree(DRAFT_LEN, 2, 4), "greedy"), EAGLE3),
}


def two_steps(
    proposer: DraftProposer,
    family: ModelFamily,
    parallel: Parallel,
    weights: Weights,
    needs: Needs,
    sampling: SamplingRows,
    tokens_BT: Array,
    table_BP: Array,
    pools: tuple[Any, Any],
) -> tuple[Drafts, Drafts]:
    """The drafts after a prompt and, of a chain, those after some of them stood: a slot's place says how many."""
    model, (kv, draft_kv) = BoundModel(family, weights, "reference", parallel), pools
    num_slots = tokens_BT.shape[0]
    sampling = sampling.replace(agreed=needs)  # type: ignore[attr-defined]
    live, length = jnp.ones((num_slots,), bool), jnp.full((num_slots,), PROMPT_LEN, jnp.int32)

    def rows(base_len: Array, num_rows: int) -> Rows:
        return Rows(base_len, live, jnp.ones((num_slots, num_rows), bool), table_BP)

    def view(committed_len: Array, pending_token: Array) -> SlotView:
        return slot_view(
            sampling,
            vocab_size=family.vocab_size,
            draft_len=DRAFT_LEN,
            committed_len=committed_len,
            pending_token=pending_token,
            num_positions=length * 0 + 5,
            page_table_BP=table_BP,
        )

    _, features_BTJ, kv = model.target(tokens_BT[:, :-1], rows(length * 0, PROMPT_LEN), kv)
    carry = proposer.init_carry(family, num_slots=num_slots, max_draft_len=DRAFT_LEN, dtype=jnp.dtype("float32"))
    known_BX = jnp.pad(tokens_BT[:, :-1], ((0, 0), (0, proposer.lookahead)))
    chunk = PrefillChunk(features_BTJ, known_BX, length * 0, live, length, length, live, table_BP)
    carry, draft_kv = proposer.prefill(model, carry, draft_kv, chunk)
    pending = tokens_BT[:, -1]
    carry = proposer.finish_prefill(carry, pending, live)
    first, carry, draft_kv = proposer.propose(model, carry, draft_kv, view(length, pending), draft_len=DRAFT_LEN)
    if first.parent_BK is not None:
        return first, first
    verified_BW = jnp.concatenate([pending[:, None], first.tokens_BK], axis=1)
    _, features_BWJ, _ = model.target(verified_BW, rows(length, DRAFT_LEN + 1), kv)
    num_emitted = 1 + (length + pending) % (DRAFT_LEN + 1)
    emitted_BE = jnp.concatenate([first.tokens_BK, pending[:, None]], axis=1)
    carry = proposer.observe(carry, features_BWJ, emitted_BE, num_emitted)
    pending = jnp.take_along_axis(emitted_BE, num_emitted[:, None] - 1, axis=1)[:, 0]
    slots = view(length + num_emitted, pending)
    return first, proposer.propose(model, carry, draft_kv, slots, draft_len=DRAFT_LEN)[0]


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_one_device(name: str) -> None:
    """Greedy and sampled slots; the shards' pages have the same numbers."""
    proposer, family = CASES[name]
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    axis_rules = AxisRules(AXES)
    slot_spec, none = axis_rules.spec("slots"), axis_rules.spec()
    kv_specs, draft_kv_specs = family.kv_specs(), proposer.draft_kv_specs(family)

    def pool_specs(specs: tuple[KVSpec, ...]) -> tuple[Any, ...]:
        return tuple(axis_rules.spec("slots", None, spec.axis, None) for spec in specs)

    def pools(num_shards: int) -> tuple[Any, Any]:
        return init_kv(kv_specs, num_shards=num_shards, **POOLS), init_kv(
            draft_kv_specs, num_shards=num_shards, **POOLS
        )

    params = [SamplingParams(temperature=0.8 * (slot % 2), stop_token_ids=[0]) for slot in range(NUM_SLOTS)]
    sampling = sampling_rows(*params)
    tokens_BT = np.random.default_rng(1).integers(0, family.vocab_size, (NUM_SLOTS, PROMPT_LEN + 1)).astype(np.int32)
    own_pages = 1 + np.arange(SLOTS_PER_SHARD * PAGES_PER_SLOT, dtype=np.int32).reshape(SLOTS_PER_SHARD, PAGES_PER_SLOT)
    weights, needs = family.init_weights(jax.random.key(0), None), sampling.needs
    run = partial(two_steps, proposer, family)
    on_mesh = jax.jit(
        jax.shard_map(
            partial(run, AXES),
            mesh=mesh,
            in_specs=(
                weight_specs(family, axis_rules),
                none,
                slot_spec,
                slot_spec,
                slot_spec,
                (pool_specs(kv_specs), pool_specs(draft_kv_specs)),
            ),
            out_specs=slot_spec,
            check_vma=False,
        )
    )
    alone = jax.jit(partial(run, NO_PARALLEL))
    found = without_optimizations(
        lambda: on_mesh(weights, needs, sampling, tokens_BT, np.tile(own_pages, (NUM_SHARDS, 1)), pools(NUM_SHARDS))
    )
    for shard in range(NUM_SHARDS):
        own = slice(shard * SLOTS_PER_SHARD, (shard + 1) * SLOTS_PER_SHARD)
        of_shard = jax.tree.map(lambda x, own=own: x[own], sampling)
        expected = without_optimizations(
            lambda of_shard=of_shard, own=own: alone(weights, needs, of_shard, tokens_BT[own], own_pages, pools(1))
        )
        jax.tree.map(lambda one, whole, own=own: np.testing.assert_array_equal(whole[own], one), expected, found)
