"""Law: every rule says on a mesh what it says on one device, and all devices of a data shard say the same."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtp_jax.acceptance.match import Match
from mtp_jax.acceptance.rejection import Rejection
from mtp_jax.acceptance.relaxed import Relaxed
from mtp_jax.acceptance.synthetic import Synthetic
from mtp_jax.core.config import SamplingParams
from mtp_jax.core.types import Accepted, Drafts, Needs, SlotView
from mtp_jax.ops.sharding import NO_PARALLEL, Parallel
from mtp_jax.proposers.drawing import with_next_draft
from mtp_jax.testing.rows import sampling_rows, slot_view

NUM_SLOTS, VOCAB, NUM_DRAFTS, BEGIN, END = 8, 16, 2, 1, 2
RULES = {
    "rejection": Rejection(block_verification=True),
    "relaxed": Relaxed(3, 0.4),
    "synthetic": Synthetic(Match(), (0.7, 0.5)),
}
AXES = Parallel(data="data", model="model")


def verdict(
    rule: Any, slots: SlotView, agreed: Needs, draft_BV: Any, target_BWV: Any, parallel: Parallel
) -> tuple[Drafts, Accepted]:
    slots = replace(slots, sampling=replace(slots.sampling, agreed=agreed))
    drafts = Drafts(jnp.zeros((slots.live.shape[0], 0), jnp.int32))
    for _ in range(NUM_DRAFTS):
        drafts = with_next_draft(drafts, draft_BV[:, None], slots, "probabilistic", parallel)
    return drafts, rule.accept(drafts, target_BWV, slots, parallel)


@pytest.mark.parametrize("name", ["rejection", "relaxed", pytest.param("synthetic", marks=pytest.mark.long)])
def test_bug_b05_all_devices_decide_what_one_would(name: str) -> None:
    """Two data shards of two devices, vocabulary over all four; all slots greedy, then greedy and sampled ones."""
    rule, vocab = RULES[name], ("data", "model")
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), vocab)
    specs = (P("data"), P(), P(None, vocab), P(None, None, vocab))
    alone = jax.jit(partial(verdict, rule, parallel=NO_PARALLEL))

    def every_device_its_own(*inputs: Any) -> Any:
        return jax.tree.map(lambda x: x[None], verdict(rule, *inputs, parallel=AXES))

    on_mesh = jax.jit(
        jax.shard_map(
            every_device_its_own,
            mesh=mesh,
            in_specs=specs,
            out_specs=P("model", "data"),
            check_vma=False,
        )
    )
    rng = np.random.default_rng(0)
    lengths = set()
    for temperatures in ((0.0,), (0.0, 0.7, 1.3)):
        # With a stop id each: jaxlib 0.11.2 crashes when it partitions comparisons with none.
        marks = {"stop_token_ids": [0], "thinking_token_ids": (BEGIN, END)}
        every = [SamplingParams(temperature=one, **marks) for one in temperatures]  # type: ignore[arg-type]
        params = [every[slot % len(every)] for slot in range(NUM_SLOTS)]
        history_BS = jnp.full((NUM_SLOTS, 4), BEGIN)
        slots = slot_view(sampling_rows(*params), vocab_size=VOCAB, draft_len=NUM_DRAFTS, history_BS=history_BS)
        draft_BV = rng.normal(size=(NUM_SLOTS, VOCAB)).astype(np.float32)
        changes_BWV = rng.normal(size=(NUM_SLOTS, NUM_DRAFTS + 1, VOCAB)).astype(np.float32)
        # As `engine.vote` agrees: a slot that names thinking tokens may come to need whole logits.
        needs = replace(slots.sampling.needs, whole_logits=jnp.array(isinstance(rule, Relaxed) or len(every) > 1))
        inputs = (slots, needs, draft_BV, draft_BV[:, None] + 0.3 * changes_BWV)
        expected = jax.device_get(alone(*inputs))
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(inputs, specs, strict=True)]
        found = jax.device_get(on_mesh(*placed))
        for one, devices in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            for own in devices:
                np.testing.assert_array_equal(own, one)
        lengths.update(expected[1].num_accepted.tolist())
    assert len(lengths) > 1
