"""Late results: in order, by their records, and none before its time."""

import jax
import jax.numpy as jnp
import pytest

from mtp_jax.core.layout import OutputColumn
from mtp_jax.core.shapes import StepShape
from mtp_jax.core.topology import CHAIN
from mtp_jax.core.types import Logprobs, PackedOutputs
from mtp_jax.engine.decisions import LaunchDecision, SlotDecision, StepDecision
from mtp_jax.engine.readback import Launch, Readback

NO_LOGPROBS = Logprobs(
    chosen_BE=jnp.zeros((3, 2)),
    top_ids_BEQ=jnp.zeros((3, 2, 1), jnp.int32),
    top_BEQ=jnp.zeros((3, 2, 1)),
    rank_BE=jnp.zeros((3, 2), jnp.int32),
)


def launch(number: int, *, slots: tuple[int, ...] = (0, 2)) -> Launch:
    """Three slots, one draft; slot b emits `b` tokens named after it."""
    rows = []
    for b in range(3):
        fixed = {
            OutputColumn.NUM_EMITTED: min(b, 2),
            OutputColumn.NUM_ACCEPTED: b % 2,
            OutputColumn.NUM_DRAFTED: 1,
            OutputColumn.DRAFT_DEPTH: 1,
            OutputColumn.COMMITTED_LEN: 100 * number + b,
            OutputColumn.FINISHED: b == 2,
        }
        tokens, drafts, targets = [10 * b, 10 * b + 1], [7 + b], [20 + b, 30 + b]
        rows.append([int(fixed[column]) for column in OutputColumn] + tokens + drafts + targets)
    decided = tuple(SlotDecision(slot, number, 1, 2, 2, 1, wants_logprobs=False) for slot in slots)
    outputs = PackedOutputs(small_BX=jnp.array(rows, jnp.int32), logprobs=NO_LOGPROBS)
    decision = StepDecision(number, StepShape(3, 1), decided)
    return Launch(LaunchDecision(number, decision.shape, (decision,)), outputs)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_result_is_read_once_that_many_newer_launches_are_under_way(depth: int) -> None:
    readback = Readback(depth, CHAIN)
    read = []
    for number in range(1, 6):
        readback.push(launch(number))
        read.append([result.launch.number for result in readback.ready(is_idle=False)])
    assert read == [[number - depth] if number > depth else [] for number in range(1, 6)]
    assert len(readback) == depth


def test_with_nothing_to_launch_the_oldest_result_is_read() -> None:
    readback = Readback(2, CHAIN)
    for number in (1, 2):
        readback.push(launch(number))
    assert readback.ready(is_idle=False) == []
    assert [result.launch.number for result in readback.ready(is_idle=True)] == [1]
    assert [result.launch.number for result in readback.ready(is_idle=True)] == [2]
    assert readback.ready(is_idle=True) == []


def test_a_result_holds_the_slots_of_its_record() -> None:
    readback = Readback(0, CHAIN)
    readback.push(launch(1))
    (result,) = readback.ready(is_idle=False)
    (part,) = result.shards
    assert part is not None
    first, second = part.slots
    assert (first.tokens, first.committed_len, first.finished) == ((), 100, False)
    assert (second.tokens, second.committed_len, second.finished) == ((20, 21), 102, True)
    assert (second.num_accepted, second.num_drafted) == (0, 1)
    assert (second.drafts, second.target_tokens) == ((9,), (22, 32))
    assert second.logprobs == ()


def test_bug_b40_tokens_are_plain_integers() -> None:
    readback = Readback(0, CHAIN)
    readback.push(launch(1))
    (result,) = readback.ready(is_idle=False)
    (part,) = result.shards
    assert part is not None
    slot = part.slots[1]
    numbers = [*slot.tokens, *slot.drafts, *slot.target_tokens]
    assert {type(number) for number in numbers} == {int}


def test_reading_is_the_only_explicit_transfer() -> None:
    """A guard against implicit reads lets the readback pass: it says `device_get`."""
    readback = Readback(0, CHAIN)
    readback.push(launch(1))
    with jax.transfer_guard_device_to_host("disallow"):
        assert len(readback.ready(is_idle=False)) == 1
