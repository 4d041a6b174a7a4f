"""The acceptance gate: when it closes, how it probes, when it opens, and what it leaves to the policy inside."""

from mtp_jax.core.config import SpeculativeConfig
from mtp_jax.policies.api import PolicyView, StepStats
from mtp_jax.policies.fixed import FixedDraftLen
from mtp_jax.policies.gate import AcceptanceGate
from mtp_jax.policies.registry import policy_of
from mtp_jax.policies.schedule import ScheduledDraftLen

KMAX = 3
GATE = AcceptanceGate(FixedDraftLen(), disable_below=0.5, window=8)


def told(gate: AcceptanceGate, *first_drafts: tuple[int, int]) -> AcceptanceGate:
    """After steps in which so many first drafts were made and kept; no later draft was ever kept."""
    for made, kept in first_drafts:
        gate = gate.update(StepStats(8, KMAX, (made,) * KMAX, (kept, 0, 0)))
    return gate


def chosen(gate: AcceptanceGate, step_number: int = 0, num_decoding: int = 1) -> int:
    return gate.choose(PolicyView(num_decoding, 8, KMAX, step_number))


def test_it_closes_only_when_the_window_is_full() -> None:
    assert [chosen(told(GATE, *[(1, 0)] * count)) for count in (0, 7, 8)] == [KMAX, KMAX, 0]


def test_the_threshold_itself_is_good_enough() -> None:
    assert chosen(told(GATE, (8, 4))) == KMAX
    assert chosen(told(GATE, (8, 3))) == 0


def test_only_first_drafts_count_and_steps_without_drafts_do_not() -> None:
    assert chosen(told(GATE, *[(1, 1)] * 50)) == KMAX
    closed = told(GATE, (8, 0))
    for _ in range(100):
        closed = closed.update(StepStats(8, 0, (), ()))
    assert chosen(closed) == 0


def test_old_drafts_leave_the_window() -> None:
    """Eight good ones, then bad ones: 4 of the last 8 are good after four, 3 after five."""
    assert [chosen(told(GATE, *[(1, 1)] * 8, *[(1, 0)] * bad)) for bad in (4, 5)] == [KMAX, 0]


def test_it_probes_with_one_draft_by_the_step_number_and_opens_on_good_news() -> None:
    closed = told(GATE, *[(1, 0)] * 8)
    assert [number for number in range(256) if chosen(closed, number)] == [63, 127, 191, 255]
    assert chosen(closed, 63) == 1
    assert chosen(told(closed, *[(1, 1)] * 3)) == 0
    assert chosen(told(closed, *[(1, 1)] * 4)) == KMAX


def test_closed_for_good() -> None:
    closed = told(AcceptanceGate(FixedDraftLen(), disable_below=0.5, window=8, probe_every=None), (8, 0), (8, 8))
    assert not any(chosen(closed, number) for number in range(256))


def test_no_probe_where_the_policy_inside_drafts_nothing() -> None:
    gate = told(AcceptanceGate(ScheduledDraftLen(((4, 3),)), disable_below=0.5, window=8), (8, 0))
    assert [chosen(gate, 63, num_decoding) for num_decoding in (4, 5)] == [1, 0]


def test_it_is_wired_where_it_is_asked_for() -> None:
    assert isinstance(policy_of(SpeculativeConfig(), {}), FixedDraftLen)
    gate = policy_of(SpeculativeConfig(disable_below_acceptance=0.25, acceptance_window=32), {})
    assert gate == AcceptanceGate(FixedDraftLen(), disable_below=0.25, window=32)
    assert gate.is_voted
