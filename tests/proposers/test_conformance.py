"""What every draft proposer of the table must satisfy."""

import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from mtp_jax.core.config import SamplingParams, SpeculativeConfig
from mtp_jax.core.topology import CHAIN, Topology, Tree
from mtp_jax.core.types import Drafts, LayerKV, SlotView
from mtp_jax.models.api import ModelFamily
from mtp_jax.models.bound import BoundModel
from mtp_jax.ops.kv_cache import init_kv
from mtp_jax.proposers.api import DraftProposer, PrefillChunk
from mtp_jax.proposers.dynamic_tree import DynamicTree
from mtp_jax.proposers.eagle3 import eagle3
from mtp_jax.proposers.registry import PROPOSERS
from mtp_jax.testing.rows import sampling_rows, slot_view
from mtp_jax.testing.toy_family import ToyFamily
from tests.models.tiny_eagle3 import tiny_eagle3

FAMILIES: dict[str | None, ModelFamily] = {"eagle3": tiny_eagle3()}
"""A family for the methods that need more than the toy has."""
TOY = ToyFamily(num_mtp_layers=2)
NUM_SLOTS, PAGE_SIZE, PAGES_PER_SLOT, CHUNK, KMAX = 3, 4, 4, 6, 2
PAGE_TABLE = 1 + np.arange(NUM_SLOTS * PAGES_PER_SLOT, dtype=np.int32).reshape(NUM_SLOTS, PAGES_PER_SLOT)
Started = tuple[Any, tuple[LayerKV, ...]]


def family_of(proposer: DraftProposer) -> ModelFamily:
    return FAMILIES["eagle3"] if proposer == eagle3() else TOY


@functools.cache
def model_of(proposer: DraftProposer) -> BoundModel:
    family = family_of(proposer)
    return BoundModel(family, family.init_weights(jax.random.key(0), None), "reference")


def built(method: str | None) -> DraftProposer:
    return PROPOSERS[method].build(
        FAMILIES.get(method, TOY), SpeculativeConfig(method=method, num_speculative_tokens=KMAX if method else 0)
    )


@pytest.fixture(params=PROPOSERS, ids=str, scope="module")
def proposer(request: pytest.FixtureRequest) -> DraftProposer:
    return built(request.param)


at_every_length = pytest.mark.parametrize(
    ("proposer", "draft_len"),
    [
        pytest.param(built(method), draft_len, id=f"{method}-{draft_len}")
        for method in PROPOSERS
        for draft_len in range(1 if method is None else KMAX + 1)  # plain decoding is never asked for drafts
    ],
    scope="module",
)


@pytest.fixture(scope="module")
def started(proposer: DraftProposer) -> Started:
    """Carry and pages after a prompt of CHUNK tokens in every slot."""
    pools = {"num_pages": NUM_SLOTS * PAGES_PER_SLOT, "page_size": PAGE_SIZE, "dtype": jnp.dtype("float32")}
    family, model = family_of(proposer), model_of(proposer)
    carry = proposer.init_carry(family, num_slots=NUM_SLOTS, max_draft_len=KMAX, dtype=jnp.dtype("float32"))
    chunk = PrefillChunk(
        features_YTJ=jnp.ones((NUM_SLOTS, CHUNK, family.hidden_size)),
        tokens_YX=jnp.ones((NUM_SLOTS, CHUNK + proposer.lookahead), jnp.int32),
        start=jnp.zeros((NUM_SLOTS,), jnp.int32),
        is_first=jnp.ones((NUM_SLOTS,), bool),
        num_tokens=jnp.full((NUM_SLOTS,), CHUNK, jnp.int32),
        num_known=jnp.full((NUM_SLOTS,), CHUNK, jnp.int32),
        live=jnp.ones((NUM_SLOTS,), bool),
        page_table_YP=jnp.asarray(PAGE_TABLE),
    )
    carry, draft_kv = proposer.prefill(model, carry, init_kv(proposer.draft_kv_specs(family), **pools), chunk)
    pending = jnp.arange(NUM_SLOTS, dtype=jnp.int32)
    return proposer.finish_prefill(carry, pending, jnp.ones((NUM_SLOTS,), bool)), draft_kv


def slots_of(proposer: DraftProposer, live: list[bool], draft_len: int) -> SlotView:
    num_drafts = topology_of(proposer).num_drafts(draft_len)
    return slot_view(
        sampling_rows(*[SamplingParams(temperature=0)] * NUM_SLOTS),
        vocab_size=family_of(proposer).vocab_size,
        draft_len=draft_len,
        committed_len=[CHUNK] * NUM_SLOTS,
        pending_token=jnp.arange(NUM_SLOTS, dtype=jnp.int32),
        live=jnp.array(live),
        draft_cap=jnp.where(jnp.array(live), num_drafts, 0),
        num_positions=jnp.where(jnp.array(live), topology_of(proposer).num_positions(draft_len, num_drafts), 0),
        limit=jnp.full((NUM_SLOTS,), PAGE_SIZE * PAGES_PER_SLOT),
        page_table_BP=jnp.asarray(PAGE_TABLE),
    )


def topology_of(proposer: DraftProposer) -> Topology:
    return proposer.shape if isinstance(proposer, DynamicTree) else CHAIN


@partial(jax.jit, static_argnums=(0, 4))
def step(
    proposer: DraftProposer, carry: Any, draft_kv: Any, slots: SlotView, draft_len: int, num_emitted: Array
) -> tuple[Drafts, Any, tuple[LayerKV, ...]]:
    """Draft, then observe `num_emitted` tokens of each slot."""
    drafts, carry, draft_kv = proposer.propose(model_of(proposer), carry, draft_kv, slots, draft_len=draft_len)
    hidden = jnp.ones((NUM_SLOTS, draft_len + 1, family_of(proposer).hidden_size))
    tokens = jnp.ones((NUM_SLOTS, draft_len + 1), jnp.int32)
    return drafts, proposer.observe(carry, hidden, tokens, num_emitted), draft_kv


def facts(tree: Any) -> Any:
    return jax.tree.structure(tree), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


def test_proposers_are_frozen_and_hashable(proposer: DraftProposer) -> None:
    assert isinstance(proposer, DraftProposer)
    assert hash(proposer) == hash(proposer)


@at_every_length
def test_the_carry_keeps_its_form_for_every_draft_length(
    proposer: DraftProposer, started: Started, draft_len: int
) -> None:
    carry, draft_kv = started
    assert all(leaf.shape[0] == NUM_SLOTS for leaf in jax.tree.leaves(carry))
    drafts, after, kv_after = step(
        proposer,
        carry,
        draft_kv,
        slots_of(proposer, [True] * NUM_SLOTS, draft_len),
        draft_len,
        jnp.ones(NUM_SLOTS, jnp.int32),
    )
    assert drafts.tokens_BK.shape == (NUM_SLOTS, topology_of(proposer).num_drafts(draft_len))
    assert (drafts.parent_BK is not None) == (topology_of(proposer).is_tree and draft_len > 0)
    assert ((drafts.tokens_BK >= 0) & (drafts.tokens_BK < family_of(proposer).vocab_size)).all()
    assert drafts.probs_BKV is None  # argmax and coupled drafts have no law of their own
    assert facts(after) == facts(carry)
    assert facts(kv_after) == facts(draft_kv)


@at_every_length
def test_slots_that_are_not_live_are_left_alone(proposer: DraftProposer, started: Started, draft_len: int) -> None:
    """Carry and pages of slot 1 stay as they are, bit for bit, while its neighbours step."""
    carry, draft_kv = started
    live = [True, False, True]
    _, after, kv_after = step(
        proposer, carry, draft_kv, slots_of(proposer, live, draft_len), draft_len, jnp.array(live).astype(jnp.int32)
    )
    for before_leaf, after_leaf in zip(jax.tree.leaves(carry), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(before_leaf[1], after_leaf[1])
    for before_leaf, after_leaf in zip(jax.tree.leaves(draft_kv), jax.tree.leaves(kv_after), strict=True):
        np.testing.assert_array_equal(before_leaf[PAGE_TABLE[1]], after_leaf[PAGE_TABLE[1]])
        assert (np.asarray(before_leaf) != np.asarray(after_leaf)).any()  # the neighbours' pages did change


@at_every_length
def test_entries_of_committed_positions_are_written_whatever_the_length(
    proposer: DraftProposer, started: Started, draft_len: int
) -> None:
    """Every layer's entries below c - 1 - (its depth) are there after a step, the pending token's pair included."""
    carry, draft_kv = started
    shape = topology_of(proposer)
    blank = jax.tree.map(lambda pages: pages.at[0].set(jnp.nan), draft_kv)
    _, _, kv_after = step(
        proposer,
        carry,
        blank,
        slots_of(proposer, [True] * NUM_SLOTS, draft_len),
        draft_len,
        jnp.ones(NUM_SLOTS, jnp.int32),
    )
    for depth, layer_kv in enumerate(kv_after):
        for table in PAGE_TABLE:
            entries = np.asarray(layer_kv.k_pages)[table].reshape(PAGE_SIZE * PAGES_PER_SLOT, -1)
            is_written = (entries != 0).any(axis=1)  # a fresh pool is zero, and an entry of the toy hardly ever is
            assert is_written[: CHUNK - depth].all()
            most = shape.num_drafter_rows(draft_len) if isinstance(shape, Tree) else max(draft_len - 1, 0)
            assert not is_written[CHUNK + most :].any()
