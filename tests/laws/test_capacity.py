"""B19: the capacity rule, by brute force over all acceptance patterns.

A launch writes positions c..c+K at most, for c the device's committed_len. The host, d launches behind, knows c only as
known_len <= c <= known_len + d (K + 1), so it must hold known_len + (d + 1) (K + 1) positions, and never needs more.
A tree of R rows (its drafter's counted, if those are more) writes c..c+R-1: known_len + d (K + 1) + R positions.
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
TREES = {2: (2, 3), 3: (4, 12), 4: (4, 5), 7: (2, 9)}  # K: (topk, nodes); some drafters write further than the target


def spec_of(draft_len: int, tree: tuple[int, int] | None) -> SpeculativeConfig:
    if tree is None:
        return SpeculativeConfig(num_speculative_tokens=draft_len)
    topk, nodes = tree
    return SpeculativeConfig(method="dynamic_tree", num_speculative_tokens=draft_len, tree_topk=topk, tree_nodes=nodes)


def one_request(spec: SpeculativeConfig, depth: int, num_steps: int) -> HostModel:
    """Pages of one position: a bound too low by one is one page too few."""
    draft_len = spec.num_speculative_tokens
    reach = spec.topology.num_positions(draft_len, spec.topology.num_drafts(draft_len))
    max_model_len = 4 + (num_steps + depth + 2) * (draft_len + 1) + reach
    host = HostModel(
        EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=1,
            cache=CacheConfig(page_size=1),
            speculative=spec,
            readback_depth=depth,
        )
    )
    host.submit(numbered_request(0, prompt_len=2, max_tokens=max_model_len))
    host.step(0, (0,))
    return host


def slack_of_each_launch(
    draft_len: int, depth: int, pattern: tuple[int, ...], tree: tuple[int, int] | None = None
) -> list[int]:
    """For each launch: positions held by the rule's own formula, less the last one the launch may write."""
    spec = spec_of(draft_len, tree)
    num_drafts = spec.topology.num_drafts(draft_len)
    num_positions = draft_len + 1 if tree is None else max(num_drafts + 1, tree[0] * (draft_len - 1))
    host = one_request(spec, depth, len(pattern))
    slack = []
    for num_right in pattern:
        (slot,) = host.scheduler.slots
        known, in_flight = slot.known_len, slot.num_in_flight
        written_end = host.device.slots[0].committed_len + num_positions
        decision = host.step(draft_len, (num_right,))
        assert isinstance(decision, StepDecision)
        bound = known + in_flight * (draft_len + 1) + num_positions
        assert in_flight <= depth
        assert decision.slots[0].draft_cap == num_drafts
        assert decision.slots[0].num_pages >= written_end
        assert host.device.max_position_written == written_end - 1 < bound
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
@pytest.mark.parametrize(("draft_len", "tree"), TREES.items(), ids=str)
def test_b19_the_capacity_rule_of_trees_holds_and_is_tight(draft_len: int, tree: tuple[int, int], depth: int) -> None:
    """A tree writes all its rows and its drafter's, and gains one token a level: the bound grows by no more."""
    patterns = itertools.product(range(draft_len + 1), repeat=NUM_STEPS[draft_len])
    slack = [slack for pattern in patterns for slack in slack_of_each_launch(draft_len, depth, pattern, tree)]
    assert min(slack) == 0
    assert max(slack) == depth * draft_len


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("draft_len", range(1, 8))
def test_b19_a_bound_one_smaller_fails(draft_len: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = Scheduler._reserve

    def reserve_one_less(self: Scheduler, slot: Slot, draft_len: int) -> int | None:
        slot.reserved_len -= 1
        reserved = reserve(self, slot, draft_len)
        slot.reserved_len += 1
        return reserved

    monkeypatch.setattr(Scheduler, "_reserve", reserve_one_less)
    with pytest.raises(CheckFailed, match="pages"):
        slack_of_each_launch(draft_len, depth, (draft_len,) * 3)
