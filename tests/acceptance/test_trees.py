"""Match on trees against a walk in plain Python: every slot its own tree, its own target, its own cap."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.acceptance.match import Match
from mtp_jax.acceptance.registry import rule_of
from mtp_jax.core.config import SamplingParams, SpeculativeConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.core.types import Accepted, Drafts
from mtp_jax.ops.kv_cache import row_positions
from mtp_jax.ops.sampling import target_noise
from mtp_jax.ops.sharding import NO_PARALLEL
from mtp_jax.testing.oracle import target_noise_at
from mtp_jax.testing.rows import sampling_rows, slot_view

VOCAB, NUM_DRAFTS, DEPTH, NUM_SLOTS = 4, 8, 4, 6
COMMITTED = 5


@st.composite
def trees(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(parents, tokens) of NUM_DRAFTS nodes, at most DEPTH deep; siblings differ."""
    parents: list[int] = []
    tokens: list[int] = []
    depth, taken = [0], {0: set[int]()}
    for row in range(1, NUM_DRAFTS + 1):
        parent = draw(st.sampled_from([r for r in range(row) if depth[r] < DEPTH and len(taken[r]) < VOCAB]))
        token = draw(st.sampled_from([t for t in range(VOCAB) if t not in taken[parent]]))
        taken[parent].add(token)
        taken[row] = set()
        depth.append(depth[parent] + 1)
        parents.append(parent)
        tokens.append(token)
    return tuple(parents), tuple(tokens)


@jax.jit
def verdict(
    tokens: jax.Array, parents: jax.Array, logits: jax.Array, caps: jax.Array, temperature: jax.Array
) -> Accepted:
    rows = sampling_rows(*[SamplingParams()] * NUM_SLOTS).replace(temperature_B=temperature)  # type: ignore[attr-defined]
    committed = jnp.full((NUM_SLOTS,), COMMITTED)
    noise = target_noise(rows, row_positions(committed + 1, DEPTH + 1), VOCAB)
    slots = slot_view(rows, vocab_size=VOCAB, draft_len=DEPTH, committed_len=committed, draft_cap=caps, noise_BWV=noise)
    return Match().accept(Drafts(tokens, parent_BK=parents), logits, slots, NO_PARALLEL)


def walk(parents: Sequence[int], tokens: Sequence[int], targets: Sequence[int]) -> list[int]:
    """From the pending token on, always to the child that is the target's token."""
    path = [0]
    while True:
        children = [
            row
            for row, (parent, token) in enumerate(zip(parents, tokens, strict=True), start=1)
            if parent == path[-1] and token == targets[parent]
        ]
        if not children:
            return path
        path.append(children[0])


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_the_right_path_is_accepted_and_no_other(data: st.DataObject, seed: int) -> None:
    """Greedy and sampled slots; row w's token is drawn with the noise of its position, not of its place."""
    drawn = data.draw(st.lists(trees(), min_size=NUM_SLOTS, max_size=NUM_SLOTS))
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(NUM_SLOTS, NUM_DRAFTS + 1, VOCAB)).astype(np.float32)
    caps = rng.integers(0, NUM_DRAFTS + 1, NUM_SLOTS)
    caps[:3] = NUM_DRAFTS
    temperature = np.array([0.0, 1.0] * 3, np.float32)
    accepted = verdict(
        np.array([tokens for _, tokens in drawn], np.int32),
        np.array([parents for parents, _ in drawn], np.int32),
        logits,
        caps.astype(np.int32),
        temperature,
    )
    assert accepted.path_BE is not None
    for slot, (parents, tokens) in enumerate(drawn):
        depth = [0]
        for parent in parents:
            depth.append(depth[parent] + 1)
        scores = logits[slot] - logits[slot].max(axis=-1, keepdims=True)
        if temperature[slot]:
            scores = scores + np.stack([target_noise_at(slot, COMMITTED + 1 + d, VOCAB) for d in depth])
        targets = scores.argmax(axis=-1).tolist()
        cap = int(caps[slot])
        path = walk(parents[:cap], tokens[:cap], targets)
        assert accepted.target_tokens_BW[slot].tolist() == targets
        assert int(accepted.num_accepted[slot]) == len(path) - 1
        assert accepted.path_BE[slot, : len(path)].tolist() == path
        assert accepted.tokens_BE[slot, : len(path)].tolist() == [targets[row] for row in path]


def test_more_drafts_never_accept_less() -> None:
    """The same tree under every cap: each is a superset of the one before."""
    parents = np.tile([0, 0, 1, 1, 2, 3, 5, 6], (NUM_SLOTS, 1)).astype(np.int32)
    tokens = np.tile([1, 2, 1, 0, 3, 2, 0, 3], (NUM_SLOTS, 1)).astype(np.int32)
    logits = np.random.default_rng(0).normal(size=(NUM_SLOTS, NUM_DRAFTS + 1, VOCAB)).astype(np.float32)
    logits[0] = np.eye(VOCAB)[[1, 1, 0, 2, 0, 0, 3, 0, 0]]  # the whole path 1, 3, 6, 8 is right
    numbers = np.stack(
        [
            verdict(tokens, parents, logits, np.full(NUM_SLOTS, cap, np.int32), np.zeros(NUM_SLOTS)).num_accepted
            for cap in range(NUM_DRAFTS + 1)
        ]
    )
    assert (np.diff(numbers, axis=0) >= 0).all()
    assert numbers[:, 0].tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 4]


def test_a_rule_for_chains_refuses_trees_at_start() -> None:
    spec = SpeculativeConfig(method="dynamic_tree", acceptance="rejection", draft_sampling="greedy")
    with pytest.raises(ConfigError, match=r"rejection acceptance takes chains of drafts, .*'dynamic_tree' makes trees"):
        rule_of(spec)
