"""Seats, and the arithmetic of the host's bounds."""

import pytest

from mtp_jax.core.config import SamplingParams
from mtp_jax.core.errors import InvariantError
from mtp_jax.engine.requests import Request, RequestState
from mtp_jax.engine.slots import SlotTable


def state(name: str = "a", tokens: tuple[int, ...] = (), limit: int = 40) -> RequestState:
    return RequestState(Request(name, (1, 2, 3), SamplingParams(), seed=0), limit, tokens=list(tokens))


def test_the_lowest_free_seat_is_taken_first() -> None:
    slots = SlotTable(3)
    seated = [slots.seat(state(name), []) for name in "abc"]
    assert [slot.index for slot in seated] == [0, 1, 2]
    assert not slots.has_free
    slots.vacate(seated[1])
    again = slots.seat(state("d"), [])
    assert (again.index, again.admission) == (1, 4)
    assert len(slots) == 3


def test_a_seat_is_found_by_its_admission_only() -> None:
    """What is in flight for an earlier owner never reaches the next one."""
    slots = SlotTable(1)
    first = slots.seat(state("a"), [])
    slots.vacate(first)
    second = slots.seat(state("b"), [])
    assert slots.find(0, first.admission) is None
    assert slots.find(0, second.admission) is second
    assert slots.of_request("a") is None
    assert slots.of_request("b") is second


def test_a_seat_cannot_be_vacated_by_somebody_else() -> None:
    slots = SlotTable(1)
    first = slots.seat(state("a"), [])
    slots.vacate(first)
    slots.seat(state("b"), [])
    with pytest.raises(InvariantError, match="does not hold it"):
        slots.vacate(first)


def test_a_resumed_request_brings_its_tokens_and_its_pending_token() -> None:
    slot = SlotTable(1).seat(state("a", tokens=(7, 8, 9)), [])
    assert slot.prompt == [1, 2, 3, 7, 8]
    assert slot.pending_token == 9


def test_b10_the_bound_follows_launches_and_results() -> None:
    """P = 5, w = 4, one token emitted: the bound goes 5, 9, (13), and 10 once the first result is read."""
    slot = SlotTable(1).seat(state(limit=40), [])
    slot.prompt = [1] * 5
    slot.launched_prefill(5)
    assert (slot.known_len, slot.reserved_len, slot.remaining) == (5, 5, 35)
    slot.launched_decode(4)
    assert (slot.known_len, slot.min_len, slot.reserved_len) == (5, 6, 9)
    slot.launched_decode(4)
    assert (slot.min_len, slot.reserved_len) == (7, 13)
    slot.reconciled_decode(4, num_emitted=1, committed_len=6)
    assert (slot.known_len, slot.min_len, slot.reserved_len, slot.num_in_flight) == (6, 7, 10, 1)


@pytest.mark.parametrize("committed_len", [4, 10])
def test_a_length_outside_its_bounds_stops_the_engine(committed_len: int) -> None:
    slot = SlotTable(1).seat(state(), [])
    slot.launched_prefill(3)
    slot.known_len = slot.reserved_len = 5
    slot.launched_decode(4)
    with pytest.raises(InvariantError, match=f"committed_len {committed_len} is outside its bounds"):
        slot.reconciled_decode(4, num_emitted=4, committed_len=committed_len)
