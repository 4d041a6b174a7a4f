"""The arithmetic of the benchmarks: acceptance by position, equality, medians, turns."""

import pytest

from mtp_jax.bench.equality import Difference, differences, first_difference
from mtp_jax.bench.measure import Run, Timing
from mtp_jax.bench.recording import Acceptance, Recorded
from mtp_jax.bench.tables import step_counts, table
from mtp_jax.policies.api import PolicyView, StepStats
from mtp_jax.policies.schedule import ScheduledDraftLen


def run_of(*tokens: tuple[int, ...], total_s: float = 1.0, num_steps: int = 1) -> Run:
    steps = (StepStats(1, 0, (), ()),) * num_steps
    return Run(
        tokens=tokens, logprobs=(), total_s=total_s, decode_s=total_s / 2, steps=steps, mean_acceptance_length=1.0
    )


def test_acceptance_counts_a_position_only_where_it_was_drafted() -> None:
    """Steps of different length, as near a limit or under a policy: what was not drafted was not rejected."""
    steps = [
        StepStats(1, 3, (1, 1, 1), (1, 1, 0)),
        StepStats(1, 3, (1, 1, 1), (0, 0, 0)),
        StepStats(1, 1, (1,), (1,)),
        StepStats(1, 3, (1, 1), (1, 1)),  # the slot's own cap was 2
        StepStats(1, 0, (), ()),
    ]
    acceptance = Acceptance.of(steps)
    assert acceptance.unconditional == (3 / 4, 2 / 3, 0 / 2)
    assert acceptance.conditional == (3 / 4, 2 / 2, 0 / 1)
    assert acceptance.draft_lens == {0: 1, 1: 1, 3: 3}


def test_acceptance_of_several_slots() -> None:
    acceptance = Acceptance.of([StepStats(8, 2, (5, 4), (3, 1)), StepStats(8, 2, (5, 1), (4, 1))])
    assert acceptance.unconditional == (7 / 10, 2 / 5)
    assert acceptance.conditional == (7 / 10, 2 / 4)  # of 3 and of 1 that drafted the second and had kept the first


def test_no_drafts_no_shares() -> None:
    assert Acceptance.of([StepStats(1, 0, (), ())]).unconditional == ()


def test_a_recorded_policy_decides_as_the_one_inside() -> None:
    policy = Recorded(ScheduledDraftLen(((2, 3),)))
    assert [policy.choose(PolicyView(n, 8, 3, 0)) for n in (1, 2, 3)] == [3, 3, 0]
    stats = StepStats(8, 3, (1, 1, 1), (1, 0, 0))
    assert policy.update(stats).update(stats).steps == [stats, stats]


@pytest.mark.parametrize(
    ("tokens", "others", "expected"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1,), (1, 2), 1), ((1, 2), (), 0), ((), (), None)],
)
def test_first_difference(tokens: tuple[int, ...], others: tuple[int, ...], expected: int | None) -> None:
    assert first_difference(tokens, others) == expected
    assert first_difference(others, tokens) == expected


def test_differences_name_the_request_and_what_each_gave() -> None:
    run, plain = run_of((1, 2), (3, 4, 5), (6,)), run_of((1, 2), (3, 7, 5), (6, 8))
    assert differences(run, plain) == [Difference(1, 1, 4, 7), Difference(2, 1, None, 8)]


def test_speeds_are_medians() -> None:
    plain = Timing(tuple(run_of((1,) * 10, total_s=seconds) for seconds in (1.0, 2.0, 50.0)))
    fast = Timing(tuple(run_of((1,) * 10, total_s=seconds, num_steps=5) for seconds in (0.5, 1.0, 0.1)))
    assert (plain.tokens_per_s, fast.tokens_per_s) == (5.0, 20.0)
    assert fast.ratio_to(plain) == 4.0
    assert fast.ms_per_step == 50.0


def test_tables_are_aligned() -> None:
    assert table([["", "tokens/s"], ["plain", "5.0"]]) == "       tokens/s\nplain       5.0"
    assert step_counts({0: 2, 3: 40}) == "3 in 40 steps, 0 in 2"
    assert step_counts({}) == "-"
