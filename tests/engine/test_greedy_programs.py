"""Programs without what greedy requests do not need: who runs them, and that they say the same."""

import functools
import re
from collections.abc import Sequence
from dataclasses import replace

import jax
import pytest

from mtp_jax.core.config import CacheConfig, EngineConfig, SamplingParams, SpeculativeConfig
from mtp_jax.core.shapes import PrefillShape, Shape, StepShape
from mtp_jax.engine.decisions import LaunchDecision
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.launch import Launcher
from mtp_jax.engine.readback import Launch
from mtp_jax.engine.requests import Request
from mtp_jax.testing.engines import without_optimizations
from mtp_jax.testing.toy_family import ToyFamily

GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPT = (3, 5, 7)
BRANCH = re.compile(r'\(tensor<i1>\) -> tensor<i32>\n +%\S+ = "stablehlo.case"')
"""A branch on a bool; one by platform is on a constant, and gone when it is compiled."""


@functools.cache
def engine() -> Engine:
    family = ToyFamily()
    config = EngineConfig(
        max_model_len=16,
        max_num_seqs=1,
        cache=CacheConfig(page_size=4),
        speculative=SpeculativeConfig(num_speculative_tokens=1),
        prefill_chunk=16,
        max_logprobs=1,
        max_stop_token_ids=1,
        greedy_programs=True,
    )
    weights = family.init_weights(jax.random.key(0), None)
    return without_optimizations(lambda: Engine(family, weights, config))


class Watched(Launcher):
    """A launcher that notes which launches needed nothing but the most likely tokens."""

    def __init__(self, inner: Launcher) -> None:
        self.inner = inner
        self.launches: list[bool] = []

    def launch(self, decision: LaunchDecision, inputs: jax.Array) -> Launch:
        self.launches.append(decision.needs.is_nothing)
        return self.inner.launch(decision, inputs)


def generate(params: SamplingParams) -> tuple[Sequence[int], list[bool]]:
    """The tokens of one request, and of each launch whether a greedy program ran."""
    running = engine().restarted(engine().config, lambda: engine().scheduler.policy)
    watched = Watched(engine().launcher)
    running.launcher = watched
    running.submit(Request("0", PROMPT, params, seed=1, eos_token_ids=()))
    tokens = [token for progress in running.run() for token in progress.new_tokens]
    return tokens, watched.launches


def test_every_shape_is_compiled_twice() -> None:
    grid = engine().grid
    assert engine().launcher.num_traces == 2 * (len(grid.all_steps()) + len(grid.all_prefills()))


@pytest.mark.parametrize("more", [{"logprobs": 1}, {"temperature": 1e-6}, {"logit_bias": {1: 0.0}}], ids=str)
def test_a_request_that_needs_more_runs_the_other_program_and_its_greedy_tokens_are_the_same(
    more: dict[str, object],
) -> None:
    greedy_tokens, ran_greedy = generate(GREEDY)
    tokens, ran_greedy_too = generate(replace(GREEDY, **more))  # type: ignore[arg-type]
    assert tokens == greedy_tokens
    assert all(ran_greedy)
    assert not any(ran_greedy_too)


@pytest.mark.parametrize("shape", [StepShape(1, 1), PrefillShape(16)], ids=str)
def test_a_greedy_program_has_no_branches(shape: Shape) -> None:
    launcher = engine().launcher
    greedy, whole = (_text(launcher, shape, is_greedy=is_greedy) for is_greedy in (True, False))
    assert not BRANCH.search(greedy)
    assert BRANCH.search(whole)


def _text(launcher: Launcher, shape: Shape, *, is_greedy: bool) -> str:
    return launcher.lower(shape, is_greedy=is_greedy).as_text()
