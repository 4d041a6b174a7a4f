"""B19: the capacity rule, by brute force over all acceptance patterns.

A launch writes positions c..c+K at most, for c the device's committed_len. The host, d launches behind, knows c only as
known_len <= c <= known_len + d (K + 1), so it must hold known_len + (d + 1) (K + 1) positions, and never needs more.
"""

import itertools

import pytest

from mtp_jax.core.config import CacheConfig, EngineConfig, SpeculativeConfig
from mtp_jax.engine.decisions import StepDecision
from mtp_jax.engine.scheduler import Scheduler
from mtp_jax.engine.slots import Slot
from mtp_jax.testing.checks import CheckFailed
from mtp_jax.testing.fake_device import HostModel, numbered_request

NUM_STEPS = {1: 7, 2: 5, 3: 4, 4: 3, 5: 3, 6: 3, 7: 3}  # (K + 1) ** steps patterns


def one_request(draft_len: int, depth: int, num_steps: int) -> HostModel:
    """Pages of one position: a bound too low by one is one page too few."""
    max_model_len = 4 + (num_steps + depth + 3) * (draft_len + 1)
    host = HostModel(
        EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=1,
            cache=CacheConfig(page_size=1),
            speculative=SpeculativeConfig(num_speculative_tokens=draft_len),
            readback_depth=depth,
        )
    )
    host.submit(numbered_request(0, prompt_len=2, max_tokens=max_model_len))
    host.step(0, (0,))
    return host


def slack_of_each_launch(draft_len: int, depth: int, pattern: tuple[int, ...]) -> list[int]:
    """For each launch: positions held by the rule's own formula, less the last one the launch may write."""
    host = one_request(draft_len, depth, len(pattern))
    slack = []
    for num_right in pattern:
        (slot,) = host.scheduler.slots
        known, in_flight = slot.known_len, slot.num_in_flight
        written_end = host.device.slots[0].committed_len + draft_len + 1
        decision = host.step(draft_len, (num_right,))
        assert isinstance(decision, StepDecision)
        bound = known + (in_flight + 1) * (draft_len + 1)
        assert in_flight <= depth
        assert decision.slots[0].draft_cap == draft_len
        assert decision.slots[0].num_pages >= written_end
        assert host.device.max_position_written < bound
        host.check()
        slack.append(bound - written_end)
    return slack


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("draft_len", range(1, 8))
def test_b19_the_capacity_rule_holds_and_is_tight(draft_len: int, depth: int) -> None:
    patterns = itertools.product(range(draft_len + 1), repeat=NUM_STEPS[draft_len])
    slack = [slack for pattern in patterns for slack in slack_of_each_launch(draft_len, depth, pattern)]
    assert min(slack) == 0
    # The slack of a launch is the drafts rejected by those in flight: none where all of them are accepted.
    assert max(slack) == depth * draft_len


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("draft_len", range(1, 8))
def test_b19_a_bound_one_smaller_fails(draft_len: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = Scheduler._reserve

    def reserve_one_less(self: Scheduler, slot: Slot, cap: int) -> int | None:
        slot.reserved_len -= 1
        reserved = reserve(self, slot, cap)
        slot.reserved_len += 1
        return reserved

    monkeypatch.setattr(Scheduler, "_reserve", reserve_one_less)
    with pytest.raises(CheckFailed, match="pages"):
        slack_of_each_launch(draft_len, depth, (draft_len,) * 3)
