"""Step costs that goodput learns in use: which shapes they speak for, for how long, and what is not believed."""

import dataclasses

import pytest

from mtp_jax.policies.api import PolicyView, StepStats
from mtp_jax.policies.goodput import Goodput

COSTS = {(1, 0): 1.0, (1, 1): 1.5, (8, 0): 2.0, (8, 1): 3.0}


def timed(slots: int, draft_len: int, elapsed_s: float | None) -> StepStats:
    return StepStats(slots, draft_len, (), (), elapsed_s)


def after(policy: Goodput, *steps: StepStats) -> Goodput:
    for step in steps:
        policy = policy.update(step)
    return policy


def test_a_shapes_own_time_counts_and_speaks_for_shapes_not_run() -> None:
    policy = after(Goodput(COSTS, (0.5,)), *[timed(1, 0, 1.5)] * 200)
    assert policy.cost(1, 0) == pytest.approx(1.5)
    assert policy.cost(8, 1) == pytest.approx(3.0 * 1.5)
    policy = after(policy, *[timed(8, 1, 3.0)] * 200)
    assert policy.cost(8, 1) == pytest.approx(3.0)
    assert policy.cost(1, 0) == pytest.approx(1.5)  # its own time, 200 steps ago
    assert policy.cost(8, 0) == pytest.approx(2.0)  # never run: as the last shape with eight slots
    slower = after(policy, *[timed(8, 1, 6.0)] * 200)
    assert slower.cost(8, 0) == pytest.approx(2 * 2.0)
    assert slower.cost(1, 1) == pytest.approx(2 * 1.5)  # nobody with one slot lately: as all together


def test_a_shape_that_did_not_run_lately_follows_the_others_again() -> None:
    policy = after(Goodput(COSTS, (0.5,)), *[timed(1, 0, 1.5)] * 200, *[timed(8, 1, 3.0)] * 255)
    assert policy.cost(1, 0) == pytest.approx(1.5)
    assert after(policy, timed(8, 1, 3.0)).cost(1, 0) == pytest.approx(1.0)


def test_the_first_observations_are_averaged_and_later_ones_count_a_tenth() -> None:
    policy = after(Goodput(COSTS, (0.5,)), timed(1, 1, 3.0))
    assert policy.cost(1, 1) == pytest.approx(3.0)
    assert after(policy, timed(1, 1, 2.0)).cost(1, 1) == pytest.approx(2.5)
    policy = after(policy, *[timed(1, 1, 3.0)] * 20)
    assert after(policy, timed(1, 1, 2.0)).cost(1, 1) == pytest.approx(0.9 * 3.0 + 0.1 * 2.0)


@pytest.mark.parametrize("elapsed_s", [None, 3.01, 1000.0, 0.33, 0.0])
def test_a_pause_is_not_a_cost(elapsed_s: float | None) -> None:
    """Beyond a factor of 3, neither the long step nor the short one after it is believed."""
    policy = after(Goodput(COSTS, (0.5,)), timed(1, 0, elapsed_s))
    assert {shape: policy.cost(*shape) for shape in COSTS} == COSTS


def test_the_bound_of_belief_follows_the_estimate() -> None:
    """Twice, and then five times its warm-up cost: within 3 times what was believed by then."""
    policy = after(Goodput(COSTS, (0.5,)), *[timed(1, 0, 2.0)] * 200)
    assert after(policy, *[timed(1, 0, 5.0)] * 200).cost(1, 0) == pytest.approx(5.0)


def test_what_goes_on_is_no_pause() -> None:
    """Ten times the warm-up cost: left out eight times, believed from then on, and a pause is one again."""
    policy = after(Goodput(COSTS, (0.5,)), *[timed(1, 0, 10.0)] * 8)
    assert policy.cost(1, 0) == COSTS[1, 0]
    policy = after(policy, *[timed(1, 0, 10.0)] * 200)
    assert policy.cost(1, 0) == pytest.approx(10.0)
    assert after(policy, timed(1, 0, 100.0)).cost(1, 0) == policy.cost(1, 0)


def test_a_length_that_did_not_run_gets_the_benefit_of_the_doubt_but_not_more_than_warm_up_allows() -> None:
    """K = 1 ran and took 1.5 times its warm-up cost. By that ratio K = 0 takes 1.5, worth 1.35; by its own, no more."""
    policy = after(Goodput({(1, 0): 1.0, (1, 1): 1.6}, (0.0,)), *[timed(1, 1, 2.4)] * 50)
    assert policy.cost(1, 0) == pytest.approx(1.5)
    assert policy.goodput(1, 0) == pytest.approx(1 / 1.35)
    assert after(policy, timed(1, 0, 1.5)).goodput(1, 0) == pytest.approx(1 / 1.5)
    barely = after(Goodput({(1, 0): 1.0, (1, 1): 1.6}, (0.0,)), *[timed(1, 1, 1.68)] * 50)
    assert barely.goodput(1, 0) == pytest.approx(1.0)  # at a ratio of 1.05: as at warm-up


def test_the_length_follows_the_cost_in_use() -> None:
    """At warm-up a draft is cheap; in use it is not."""
    policy = Goodput({(1, 0): 1.0, (1, 1): 1.2}, (0.5,))
    assert policy.choose(PolicyView(1, 1, 1, 0)) == 1
    policy = after(policy, *[StepStats(1, 1, (2,), (1,), 1.9)] * 40, *[timed(1, 0, 1.0)] * 40)
    assert policy.choose(PolicyView(1, 1, 1, 0)) == 0


def test_a_probe_drafts_as_far_as_could_earn_most() -> None:
    """With everything accepted: 1, 2/1.5, 3/2, 4/4 tokens a second."""
    costs = {(1, 0): 1.0, (1, 1): 1.5, (1, 2): 2.0, (1, 3): 4.0}
    policy = Goodput(costs, (0.0, 0.0, 0.0))
    assert [policy.choose(PolicyView(1, 1, 3, number)) for number in (62, 63, 64, 127)] == [0, 2, 0, 2]


def test_no_probe_where_nothing_could_be_gained() -> None:
    policy = Goodput({(1, 0): 1.0, (1, 1): 2.0, (1, 2): 3.0}, (0.0, 0.0))
    assert policy.choose(PolicyView(1, 1, 2, 63)) == 0
    cheaper = dataclasses.replace(policy, cost_s={**policy.cost_s, (1, 1): 1.9})
    assert cheaper.choose(PolicyView(1, 1, 2, 63)) == 1
