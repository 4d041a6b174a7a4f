"""Slot <-> request, and the host's bounds on the device's lengths.

The capacity rule (`c` is the device's committed_len, which the host learns late):

    at launch:     pages cover min(reserved_len + num_positions, limit);  reserved_len += max_emitted
    at reconcile:  known_len = c as read;                                 reserved_len -= max_emitted - num_emitted
    invariant:     known_len <= c <= reserved_len

With `cap` drafts in a chain both numbers are cap + 1. A tree of `cap` nodes writes cap + 1 positions or more, and gains
a token a level: `core.topology` has the numbers.

`min_len` is the matching lower bound for launches in flight: each emits at least one token unless the slot is finished.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from mtp_jax.core.errors import InvariantError
from mtp_jax.engine.requests import RequestState
from mtp_jax.engine.vote import LaunchNeeds


@dataclass
class Slot:
    """One request's seat on the device."""

    index: int
    admission: int  # unique per admission: late results name it, so they never reach the seat's next owner
    state: RequestState
    prompt: list[int]  # tokens to prefill; longer than the request's prompt when it was resumed
    pending_token: int | None  # a resumed request's pending token; None: the prefill draws it
    pages: list[int] = field(default_factory=list[int])
    page_keys: tuple[bytes, ...] = ()  # of the prompt's pages that may be shared: see `engine.prefixes`
    prefilled: int = 0  # prompt tokens found in shared pages, or launched
    has_launched: bool = False  # a chunk of the prompt
    known_len: int = 0
    reserved_len: int = 0
    num_in_flight: int = 0  # decode launches not yet reconciled

    @cached_property
    def needs(self) -> LaunchNeeds:
        """What its request needs of a launch's program."""
        return LaunchNeeds.of(self.state.request.params)

    @property
    def is_prefilled(self) -> bool:
        """All of the prompt was launched: the slot can decode."""
        return self.prefilled == len(self.prompt)

    @property
    def min_len(self) -> int:
        """What committed_len is at least, once everything in flight is done."""
        return self.known_len + self.num_in_flight

    @property
    def remaining(self) -> int:
        """Tokens still to emit, at most; 0 or less when the launches in flight must finish the request."""
        return self.state.limit - self.min_len

    def launched_prefill(self, num_tokens: int) -> None:
        """A prompt chunk was launched; after the last one the length is exact, not a bound."""
        self.has_launched = True
        self.prefilled += num_tokens
        self.known_len = self.reserved_len = self.prefilled

    def launched_decode(self, max_emitted: int) -> None:
        """A decode step was launched that emits at most so many tokens."""
        self.reserved_len += max_emitted
        self.num_in_flight += 1

    def reconciled_decode(self, max_emitted: int, num_emitted: int, committed_len: int) -> None:
        """A decode step's result was read."""
        self.num_in_flight -= 1
        self.reserved_len -= max_emitted - num_emitted
        if not self.known_len <= committed_len <= self.reserved_len:
            raise InvariantError(
                f"slot {self.index}: committed_len {committed_len} is outside its bounds "
                f"{self.known_len}..{self.reserved_len}"
            )
        self.known_len = committed_len


class SlotTable:
    """`num_slots` seats; the lowest free one is taken first, so that live slots stay a short prefix."""

    def __init__(self, num_slots: int) -> None:
        self._slots: list[Slot | None] = [None] * num_slots
        self._num_admissions = 0

    def __iter__(self) -> Iterator[Slot]:
        return iter([slot for slot in self._slots if slot is not None])

    def __len__(self) -> int:
        return sum(slot is not None for slot in self._slots)

    @property
    def has_free(self) -> bool:
        """A seat is free."""
        return any(slot is None for slot in self._slots)

    def seat(self, state: RequestState, pages: list[int]) -> Slot:
        """Admits a request, new or resumed, with pages for its prompt."""
        index = self._slots.index(None)
        self._num_admissions += 1
        slot = Slot(
            index=index,
            admission=self._num_admissions,
            state=state,
            prompt=state.known_tokens,
            pending_token=state.tokens[-1] if state.tokens else None,
            pages=pages,
        )
        self._slots[index] = slot
        return slot

    def vacate(self, slot: Slot) -> None:
        """Frees the seat."""
        if self._slots[slot.index] is not slot:
            raise InvariantError(f"slot {slot.index} was vacated by a request that does not hold it")
        self._slots[slot.index] = None

    def find(self, index: int, admission: int) -> Slot | None:
        """The slot, if the same admission still holds it."""
        slot = self._slots[index]
        return slot if slot is not None and slot.admission == admission else None

    def of_request(self, request_id: str) -> Slot | None:
        """The slot a request holds."""
        return next((slot for slot in self if slot.state.request.request_id == request_id), None)
