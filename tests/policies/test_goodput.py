"""The goodput policy by hand: its formula, and that two lengths of equal worth do not take turns."""

import pytest

from mtp_jax.policies.api import PolicyView, StepStats
from mtp_jax.policies.goodput import Goodput


def test_goodput_is_expected_tokens_over_cost() -> None:
    policy = Goodput({(1, 0): 1.0, (1, 1): 1.25, (1, 2): 1.5, (1, 3): 2.0}, (0.5, 0.5, 0.5))
    assert [policy.goodput(1, k) for k in range(4)] == pytest.approx([1.0, 1.5 / 1.25, 1.75 / 1.5, 1.875 / 2.0])
    assert policy.choose(PolicyView(1, 1, 3, 0)) == 1


def test_bug_b68_goodput_does_not_flutter_between_equals() -> None:
    """A length changes only for one that is better by the hysteresis, by what is known at that moment."""
    policy = Goodput({(1, 0): 1.0, (1, 1): 1.795}, (0.8,))
    num_changes = 0
    for accepted in (1, 0, 1, 1, 1, 1, 0, 1) * 10:
        before = dict(policy.current)
        policy = policy.update(StepStats(1, 1, (1,), (accepted,)))
        if before and policy.current != before:
            num_changes += 1
            gain = policy.goodput(1, policy.current[1]) / policy.goodput(1, before[1])
            assert gain > 1 + policy.hysteresis
    assert num_changes < 12


def test_a_position_never_reached_is_as_good_as_the_one_before() -> None:
    """One draft is made and kept again and again; nobody tried a second one, and it is not held to the prior."""
    policy = Goodput({(1, k): 1.0 + k for k in range(4)}, (0.5, 0.5, 0.5))
    for _ in range(100):
        policy = policy.update(StepStats(1, 1, (1,), (1,)))
    assert policy.rates[1] == policy.rates[2] == policy.rates[0] == pytest.approx(1.0, abs=0.01)
    for _ in range(100):
        policy = policy.update(StepStats(1, 2, (1, 1), (1, 0)))
    assert policy.rates[0] == pytest.approx(1.0, abs=0.01)
    assert policy.rates[1] == policy.rates[2] == pytest.approx(0.0, abs=0.01)
