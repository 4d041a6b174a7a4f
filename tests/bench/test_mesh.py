"""`bench mesh`: where tokens part, prompts near the limit, and the same step with and without the vote."""

import jax
import jax.numpy as jnp
import pytest

from mtp_jax.bench.mesh import FirstDifference, MeshBench, first_differences, near_limit_prompts, vote_costs
from mtp_jax.outputs import CompletionOutput, Logprob, RequestOutput
from tests.laws.test_meshes import engine_on


def output(tokens: list[int]) -> RequestOutput:
    logprobs = [{token: Logprob(-0.5, 1, None), token + 1: Logprob(-0.75 - token, 2, None)} for token in tokens]
    return RequestOutput("0", None, [1], [CompletionOutput(0, "", tokens, "length", logprobs=logprobs)])


def test_each_request_is_named_once_with_its_margin() -> None:
    alone, on_mesh = [output([1, 2, 3]), output([4, 5, 6])], [output([1, 2, 3]), output([4, 9, 8])]
    assert first_differences(alone, on_mesh) == [FirstDifference(1, 1, 5.25)]


def test_prompts_end_near_the_limit_and_some_far_from_it() -> None:
    lengths = [len(prompt) for prompt in near_limit_prompts(24, 64, 16)]
    assert [48 <= length <= 63 for length in lengths] == [i % 8 != 7 for i in range(16)]
    assert all(length < 32 for length in lengths[7::8])


def test_the_vote_is_timed_for_every_shape() -> None:
    engine = engine_on(2, 4)
    weights = engine.family.init_weights(jax.random.key(0), None)
    costs = list(vote_costs(engine, weights, jnp.dtype("float32"), num_rounds=1))
    assert [cost.shape for cost in costs] == list(reversed(engine.grid.all_steps()))
    assert all(cost.with_vote_us > 0 and cost.without_us > 0 for cost in costs)
    assert costs[0].share == pytest.approx(costs[0].with_vote_us / costs[0].without_us - 1)
    bench = MeshBench({"data": 2}, 3, 30, [FirstDifference(1, 4, 0.25)], costs)
    assert "2 requests equal" in bench.as_text()
    assert '"margin": 0.25' in bench.json_line({"chip": "x"})
