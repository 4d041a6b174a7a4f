"""Bytes on a device, against arrays that were put on devices."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from mtp_jax.core.config import CacheConfig
from mtp_jax.models.sharding import weight_specs
from mtp_jax.ops.placement import Placement
from mtp_jax.plan.memory import Memory, Temporaries, memory_of
from mtp_jax.plan.program import PlannedStep, abstract_target
from mtp_jax.step.program import init_state, state_specs
from tests.plan.small import question, small_family

NO_TEMPORARIES = Temporaries(0.0, 0.0, "estimate")


def bytes_on_one_device(tree: object) -> int:
    [device, *_] = jax.devices()
    return sum(
        shard.data.nbytes
        for array in jax.tree.leaves(tree)
        for shard in array.addressable_shards
        if shard.device == device
    )


@pytest.mark.parametrize("features", [("deepseek_v3",), ("glm4_moe", "tied")], ids=str)
def test_bytes_are_those_of_arrays_on_a_mesh(features: tuple[str, ...]) -> None:
    family = small_family(*features)
    asked = question(family, data=2, model=2)
    config = replace(asked.config(slots_per_shard=3), cache=CacheConfig(page_size=16, num_pages=10))
    step = PlannedStep(family, config, "bfloat16", abstract_target(asked.where, config))
    memory = memory_of(step, NO_TEMPORARIES, share=1.0)

    placement = Placement.of(config.mesh)
    weights = placement.put(family.init_weights(jax.random.key(0), jnp.bfloat16), weight_specs(family, placement.rules))
    assert memory.weight_bytes == bytes_on_one_device(weights)
    dtype = jnp.dtype("bfloat16")
    state = placement.build(
        lambda: init_state(step.program, config, dtype), state_specs(step.program, config, dtype, placement.rules)
    )
    num_positions = (5 + 1) * 16  # half of the pages and a null page
    assert memory.kv_bytes_per_token * num_positions == bytes_on_one_device(state.kv)
    assert memory.draft_kv_bytes_per_token * num_positions == bytes_on_one_device(state.draft_kv)
    rest = bytes_on_one_device(state) - bytes_on_one_device((state.kv, state.draft_kv))
    assert memory.state_bytes_per_slot * 3 == rest


def test_what_is_said_to_fit_fits_and_one_more_does_not() -> None:
    memory = Memory(
        usable_bytes=100_000,
        weight_bytes=20_000,
        kv_bytes_per_token=7,
        draft_kv_bytes_per_token=1,
        state_bytes_per_slot=100,
        temporaries=Temporaries(1_000.0, 50.0, "estimate"),
        page_size=16,
        num_data_shards=2,
        max_context=10_000,
    )
    batch = memory.largest_batch(64)
    assert batch % 2 == 0
    assert memory.used_bytes(batch, 64) <= memory.usable_bytes < memory.used_bytes(batch + 1, 64)
    context = memory.longest_context(10)
    assert memory.used_bytes(10, context) <= memory.usable_bytes < memory.used_bytes(10, context + 1)
    assert memory.longest_context(1) == pytest.approx((100_000 - 20_000 - 1_150) / 8 - 16, abs=16)
    assert replace(memory, weight_bytes=200_000).largest_batch(64) == 0
    assert replace(memory, max_context=500).longest_context(1) == 500
