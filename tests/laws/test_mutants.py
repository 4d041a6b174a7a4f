"""The checks can fail: each of these faults, planted in the host's bookkeeping, is caught by the state machine."""

from collections.abc import Callable

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from mtp_jax.core.errors import InvariantError
from mtp_jax.engine.pages import OutOfPages, PagePool, pages_for
from mtp_jax.engine.prefixes import PrefixPages
from mtp_jax.engine.scheduler import Scheduler
from mtp_jax.engine.slots import Slot, SlotTable
from mtp_jax.testing.checks import CheckFailed
from mtp_jax.testing.host_model import HostMachine

Plant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Plant] = {}


def mutant(plant: Plant) -> Plant:
    MUTANTS[plant.__name__] = plant
    return plant


@mutant
def reconcile_by_current_slot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotTable, "find", lambda self, index, admission: self._slots[index])


@mutant
def reserve_from_known_len(patch: pytest.MonkeyPatch) -> None:
    def reserve(self: Scheduler, slot: Slot, draft_len: int) -> int | None:
        cap = min(draft_len, slot.remaining - 1)
        wanted = pages_for(min(slot.known_len + cap + 1, slot.state.limit), self.config.cache.page_size)
        try:
            slot.pages.extend(self.pool.take(max(wanted - len(slot.pages), 0)))
        except OutOfPages:
            return None
        return cap

    patch.setattr(Scheduler, "_reserve", reserve)


@mutant
def reset_the_bound_to_the_length_read(patch: pytest.MonkeyPatch) -> None:
    def reconciled_decode(self: Slot, max_emitted: int, num_emitted: int, committed_len: int) -> None:
        self.num_in_flight -= 1
        self.known_len = self.reserved_len = committed_len

    patch.setattr(Slot, "reconciled_decode", reconciled_decode)


@mutant
def keep_the_bound_of_rejected_drafts(patch: pytest.MonkeyPatch) -> None:
    def reconciled_decode(self: Slot, max_emitted: int, num_emitted: int, committed_len: int) -> None:
        self.num_in_flight -= 1
        self.reserved_len -= max_emitted - 1 - num_emitted
        self.known_len = committed_len

    patch.setattr(Slot, "reconciled_decode", reconciled_decode)


@mutant
def give_pages_back_twice(patch: pytest.MonkeyPatch) -> None:
    def give_back(self: PagePool, pages: list[int]) -> None:
        for page in pages:
            del self._holders[page]
        self._free.extend(pages)
        self._free.extend(pages[-1:])

    patch.setattr(PagePool, "give_back", give_back)


@mutant
def keep_a_page_of_a_released_slot(patch: pytest.MonkeyPatch) -> None:
    give_back = PagePool.give_back
    patch.setattr(PagePool, "give_back", lambda self, pages: give_back(self, pages[:-1]))


@mutant
def bound_without_the_bonus_token(patch: pytest.MonkeyPatch) -> None:
    def launched_decode(self: Slot, max_emitted: int) -> None:
        self.reserved_len += max_emitted - 1
        self.num_in_flight += 1

    def reconciled_decode(self: Slot, max_emitted: int, num_emitted: int, committed_len: int) -> None:
        self.num_in_flight -= 1
        self.reserved_len -= max_emitted - 1 - num_emitted
        self.known_len = committed_len

    patch.setattr(Slot, "launched_decode", launched_decode)
    patch.setattr(Slot, "reconciled_decode", reconciled_decode)


@mutant
def pages_for_drafts_but_not_for_the_pending_token(patch: pytest.MonkeyPatch) -> None:
    reserve = Scheduler._reserve

    def reserve_less(self: Scheduler, slot: Slot, draft_len: int) -> int | None:
        slot.reserved_len -= 1
        try:
            return reserve(self, slot, draft_len)
        finally:
            slot.reserved_len += 1

    patch.setattr(Scheduler, "_reserve", reserve_less)


@mutant
def forget_launches_in_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Slot, "min_len", property(lambda self: self.known_len))


@mutant
def cap_is_the_whole_draft_len(patch: pytest.MonkeyPatch) -> None:
    reserve = Scheduler._reserve
    patch.setattr(
        Scheduler,
        "_reserve",
        lambda self, slot, draft_len: None if reserve(self, slot, draft_len) is None else self.config.max_draft_len,
    )


@mutant
def resume_without_the_last_known_token(patch: pytest.MonkeyPatch) -> None:
    seat = SlotTable.seat

    def seat_resumed(self: SlotTable, state: object, pages: list[int]) -> Slot:
        slot = seat(self, state, pages)  # type: ignore[arg-type]
        slot.pending_token = None
        return slot

    patch.setattr(SlotTable, "seat", seat_resumed)


@mutant
def preempted_request_goes_missing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "preempt", lambda self, slot: self._release(slot))


@mutant
def pages_of_a_prompt_are_found_before_they_are_written(patch: pytest.MonkeyPatch) -> None:
    admit_next = Scheduler.admit_next

    def admit_and_publish(self: Scheduler) -> bool:
        is_seated = admit_next(self)
        for slot in self.slots:
            self.prefixes.publish(slot.page_keys, slot.pages[: len(slot.page_keys)])
        return is_seated

    patch.setattr(Scheduler, "admit_next", admit_and_publish)


@mutant
def a_page_that_is_not_full_yet_is_found(patch: pytest.MonkeyPatch) -> None:
    decide_prefill = Scheduler._decide_prefill

    def decide_and_publish(self: Scheduler, slot: Slot, *rest: object) -> object:
        decision = decide_prefill(self, slot, *rest)  # type: ignore[arg-type]
        num_begun = pages_for(slot.prefilled, self.config.cache.page_size)
        keys = slot.page_keys[:num_begun]
        self.prefixes.publish(keys, slot.pages[: len(keys)])
        return decision

    patch.setattr(Scheduler, "_decide_prefill", decide_and_publish)


@mutant
def the_first_holder_of_a_shared_page_takes_it_along(patch: pytest.MonkeyPatch) -> None:
    def share(self: PagePool, pages: list[int]) -> None:
        for page in pages:
            self._idle.pop(page, None)
            self._holders[page] = 1

    patch.setattr(PagePool, "share", share)


@mutant
def a_page_is_found_after_it_was_given_to_another(patch: pytest.MonkeyPatch) -> None:
    keep = PagePool.keep
    patch.setattr(PagePool, "keep", lambda self, page, on_loss: keep(self, page, lambda: None))


@mutant
def a_key_knows_its_page_and_not_what_stands_before(patch: pytest.MonkeyPatch) -> None:
    def keys(self: PrefixPages, tokens: list[int]) -> tuple[bytes, ...]:
        starts = range(0, len(tokens) - self._page_size, self._page_size)
        return tuple(bytes(tokens[start : start + self._page_size]) for start in starts)

    patch.setattr(PrefixPages, "keys", keys)


@pytest.mark.parametrize("plant", MUTANTS.values(), ids=list(MUTANTS))
def test_the_planted_fault_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    until_found = settings(
        max_examples=400,
        stateful_step_count=50,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises((CheckFailed, InvariantError)):
        run_state_machine_as_test(HostMachine, settings=until_found)
