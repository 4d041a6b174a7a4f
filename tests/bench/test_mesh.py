"""`bench mesh`: where tokens part, prompts near the limit, the step with and without the vote, speed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.bench.intervals import FEWEST, Interval, median_interval
from mtp_jax.bench.mesh import FirstDifference, MeshBench, first_differences, near_limit_prompts
from mtp_jax.bench.scaling import Pass, Scaling
from mtp_jax.bench.vote_cost import MANY, VoteCost, VotingOften, full_shapes, vote_costs
from mtp_jax.core.config import MeshConfig
from mtp_jax.core.shapes import StepShape
from mtp_jax.ops.placement import Placement
from mtp_jax.ops.sharding import Parallel
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


def test_the_vote_is_timed_in_the_longest_and_the_shortest_step() -> None:
    engine = engine_on(2, 4)
    shapes = full_shapes(engine)
    assert shapes == (StepShape(1, 3), StepShape(1, 0))
    [cost] = vote_costs(engine, jnp.dtype("float32"), shapes[1:], num_rounds=FEWEST, chain=2)
    assert (cost.shape, cost.num_rounds, cost.chain) == (StepShape(1, 0), FEWEST, 2)
    assert cost.without_us > 0
    assert cost.added_us.low <= cost.added_us.median <= cost.added_us.high


def test_many_votes_are_taken_and_agree_on_the_same() -> None:
    """Each of them is a reduction of its own in the compiled program: none was found to be in vain."""
    placement = Placement.of(MeshConfig(data=4, model=2))
    wishes_DV = np.arange(12, dtype=np.int32).reshape(4, 3)[::-1].copy()
    rows = placement.rules.spec("slots", None)

    def agreed(parallel: Parallel) -> tuple[str, np.ndarray]:
        vote = placement.map(lambda wish_DV: parallel.largest(wish_DV[0])[None], rows, rows)
        compiled = jax.jit(vote).lower(placement.put_rows(wishes_DV)).compile()
        return str(compiled.as_text()), np.asarray(compiled(placement.put_rows(wishes_DV)))

    for times in (1, MANY):
        text, agreed_DV = agreed(VotingOften("data", "model", times=times))
        assert text.count(" all-reduce(") == times
        assert agreed_DV.tolist() == [[9, 10, 11]] * 4


def test_a_median_and_its_interval() -> None:
    """By a table of the sign test: of 20 values the 6th and the 15th."""
    assert median_interval([float(i) for i in range(1, 21)]) == Interval(10.5, 6.0, 15.0)
    with pytest.raises(ValueError, match="at least 6"):
        median_interval([1.0] * 5)


def test_what_is_printed() -> None:
    cost = VoteCost(StepShape(8, 3), 4000.0, Interval(8.0, -4.0, 20.0), Interval(10.0, 9.0, 11.0), 40, 20)
    speed = Scaling([Pass(2.0, 100, 40), Pass(2.0, 100, 40)], [Pass(1.0, 100, 20), Pass(1.0, 80, 20)])
    bench = MeshBench({"data": 2}, 3, 30, [FirstDifference(1, 4, 0.25)], [cost], speed)
    assert "8.0 us [-4.0, 20.0] (+0.20% [-0.10%, +0.50%])" in cost.as_text()
    assert "2 requests equal" in bench.as_text()
    assert "1.80x [1.60, 2.00]" in bench.as_text()
    facts = json.loads(bench.json_line({"chip": "x"}))
    assert facts["differences"] == [{"request": 1, "position": 4, "margin": 0.25}]
    assert facts["votes"][0]["added_us"] == {"median": 8.0, "low": -4.0, "high": 20.0}
    assert facts["scaling"]["ratios"] == [2.0, 1.6]
    assert facts["scaling"]["alone"]["ms_per_launch"] == [50.0, 50.0]
