"""Real families in the whole engine: several slots, too few pages, all draft lengths; and a step's memory."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.acceptance.match import Match
from mtp_jax.checkpoints import LoadedModel, load_model
from mtp_jax.core.config import CacheConfig, EngineConfig, SpeculativeConfig
from mtp_jax.core.shapes import PrefillShape, ShapeGrid, StepShape
from mtp_jax.engine.batch import BatchBuilder
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.launch import Launcher
from mtp_jax.ops.placement import Placement
from mtp_jax.proposers.registry import PROPOSERS, resolve_method
from mtp_jax.step.program import StepProgram
from mtp_jax.testing.driving import run_plan
from mtp_jax.testing.engines import poison, restart
from mtp_jax.testing.policies import ScriptedDraftLen
from tests.laws.support import request

GOLDENS = Path(__file__).parents[1] / "goldens"
NUM_TOKENS = 40
KMAX = 2


@pytest.fixture(params=["deepseek_v3_tiny", "deepseek_v3_mtp2_tiny", "glm4_moe_tiny"], scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def loaded(name: str) -> LoadedModel:
    return load_model(GOLDENS / name, dtype="float32")


def config_of(num_pages: int) -> EngineConfig:
    return EngineConfig(
        max_model_len=96,
        max_num_seqs=3,
        prefill_chunk=16,
        cache=CacheConfig(page_size=4, num_pages=num_pages),
        speculative=SpeculativeConfig(num_speculative_tokens=KMAX),
        max_logprobs=1,
    )


@pytest.fixture(scope="module")
def engine(loaded: LoadedModel) -> Engine:
    # Its three requests need 12 + 15 + 19 pages in the end.
    return Engine(loaded.family, loaded.weights, config_of(num_pages=32))


@pytest.mark.parametrize(("wishes", "depth"), [((KMAX,), 1), ((0, 2, 1, 2, 0, 0, 2), 2), ((1,), 0)])
def test_batches_preempted_for_want_of_pages_write_the_golden_tokens(
    engine: Engine, name: str, wishes: tuple[int, ...], depth: int
) -> None:
    expected = np.load(GOLDENS / name / "expected.npz")
    running = restart(engine, policy=ScriptedDraftLen(wishes), readback_depth=depth)
    poison(running)
    requests = [
        request(str(case), expected[f"prompt_{case}"].tolist(), temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        for case in range(3)
    ]
    run = run_plan(running, requests)
    for case in range(3):
        assert run.finished[str(case)].state.tokens == expected[f"greedy_{case}"].tolist()
    assert running.scheduler.totals.num_preemptions > 0


@pytest.mark.parametrize("shape", [StepShape(3, KMAX), PrefillShape(16)], ids=str)
def test_a_step_keeps_one_page_pool(loaded: LoadedModel, shape: StepShape | PrefillShape) -> None:
    """The pools of all layers are the inputs' own, and a step needs far less beside them than one layer's."""
    config = config_of(num_pages=60_000)
    method, _ = resolve_method(config.speculative, loaded.family)
    proposer = PROPOSERS[method].build(loaded.family, config.speculative)
    program = StepProgram(
        family=loaded.family,
        proposer=proposer,
        rule=Match(),
        attention_backend="reference",
        num_stop_ids=config.max_stop_token_ids,
        list_sizes=config.list_sizes,
        max_logprobs=config.max_logprobs,
    )
    placement = Placement()
    batch = BatchBuilder(config, placement)
    launcher = Launcher(program, loaded.weights, config, ShapeGrid.of(config), batch, placement, jnp.dtype("float32"))
    state = launcher._state
    pool_bytes = sum(array.nbytes for array in jax.tree.leaves((state.kv, state.draft_kv)))
    layer_bytes = state.kv[0].k_pages.nbytes
    memory = launcher.lower(shape).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < layer_bytes / 10
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < layer_bytes / 10
