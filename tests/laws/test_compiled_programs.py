"""Laws of what is compiled: as many programs as shapes, none later; uploads explicit; one page pool."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from mtp_jax.acceptance.match import Match
from mtp_jax.core.config import CacheConfig, EngineConfig, SpeculativeConfig
from mtp_jax.core.errors import InvariantError
from mtp_jax.core.shapes import PrefillShape, ShapeGrid, StepShape
from mtp_jax.engine.batch import BatchBuilder
from mtp_jax.engine.decisions import LaunchDecision
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.launch import Launcher
from mtp_jax.engine.requests import Request
from mtp_jax.ops.placement import Placement
from mtp_jax.proposers.registry import PROPOSERS
from mtp_jax.step.program import StepProgram
from mtp_jax.testing.driving import Plan, run_plan
from mtp_jax.testing.engines import restart
from mtp_jax.testing.policies import ScriptedDraftLen
from mtp_jax.testing.strategies import batches, draft_schedules, plans
from mtp_jax.testing.toy_family import ToyFamily
from tests.laws.support import ENGINES, THREE_SLOTS, assert_plain, request


@pytest.mark.parametrize("build", ENGINES.values(), ids=list(ENGINES))
def test_traces_equal_shapes(build: Callable[[], Engine]) -> None:
    engine = build()
    num_shapes = len(engine.grid.all_steps()) + len(engine.grid.all_prefills())
    assert engine.launcher.num_traces == num_shapes
    assert set(engine.launcher.warm_up_s) == {*engine.grid.all_steps(), *engine.grid.all_prefills()}


@given(batch=batches(29, max_model_len=48), schedule=draft_schedules(3), plan=plans(5))
def test_nothing_is_traced_after_warm_up(batch: tuple[Request, ...], schedule: ScriptedDraftLen, plan: Plan) -> None:
    engine = THREE_SLOTS()
    traces = engine.launcher.num_traces
    run_plan(restart(engine, policy=schedule), batch, plan)
    assert engine.launcher.num_traces == traces


def test_a_shape_outside_the_grid_is_refused() -> None:
    engine = THREE_SLOTS()
    with pytest.raises(InvariantError, match="grid"):
        engine.launcher.launch(LaunchDecision(1, StepShape(2, 1), ()), jax.device_put(np.zeros((2, 1), np.int32)))


def test_each_upload_of_the_loop_is_explicit() -> None:
    """The loop runs where an implicit transfer to the device raises."""
    engine = restart(THREE_SLOTS())
    batch = [request(str(i), (i + 1,) * 20, temperature=float(i), max_tokens=12, logprobs=2) for i in range(4)]
    with jax.transfer_guard_host_to_device("disallow"):
        run = run_plan(engine, batch)
    assert_plain(engine, batch, run)


def test_the_guard_would_see_an_implicit_upload() -> None:
    with jax.transfer_guard_host_to_device("disallow"), pytest.raises(Exception, match=r"[Dd]isallowed"):
        jax.numpy.add(jax.device_put(np.ones(3, np.float32)), np.ones(3, np.float32))


@pytest.mark.parametrize(
    ("method", "shape"),
    [
        ("mtp_eagle", StepShape(1, 0)),
        ("mtp_eagle", StepShape(1, 2)),
        ("dynamic_tree", StepShape(1, 2)),
        ("mtp_eagle", PrefillShape(16)),
    ],
    ids=str,
)
def test_a_step_keeps_one_page_pool(method: str, shape: StepShape | PrefillShape) -> None:
    """The pool of the outputs is that of the inputs, and what a step needs beside it is a small part of one layer's.

    Compaction of a tree's accepted path is part of its step.
    """
    launcher = large_pool(method)
    state = launcher._state
    pool_bytes = sum(array.nbytes for array in jax.tree.leaves((state.kv, state.draft_kv)))
    memory = launcher.lower(shape).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < state.kv[0].k_pages.nbytes / 10
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < state.kv[0].k_pages.nbytes / 10


@functools.cache
def large_pool(method: str) -> Launcher:
    """A launcher over 20,000 pages; nothing is compiled yet."""
    family = ToyFamily()
    speculative = SpeculativeConfig(method=method, num_speculative_tokens=2)
    config = EngineConfig(
        max_model_len=64,
        max_num_seqs=1,
        cache=CacheConfig(page_size=4, num_pages=20_000),
        speculative=speculative,
        prefill_chunk=16,
    )
    proposer = PROPOSERS[method].build(family, speculative)
    program = StepProgram(
        family=family,
        proposer=proposer,
        rule=Match(),
        attention_backend="reference",
        num_stop_ids=config.max_stop_token_ids,
        list_sizes=config.list_sizes,
        max_logprobs=config.max_logprobs,
        topology=config.topology,
    )
    weights = family.init_weights(jax.random.key(0), None)
    placement = Placement()
    batch = BatchBuilder(config, placement)
    return Launcher(program, weights, config, ShapeGrid.of(config), batch, placement, jnp.dtype("float32"))
