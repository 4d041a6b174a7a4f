"""The step decision: who is admitted, who waits, who gives way, and with how many drafts. No device is needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.core.config import CacheConfig, EngineConfig, SpeculativeConfig
from mtp_jax.core.errors import InvariantError
from mtp_jax.engine.decisions import PrefillDecision, StepDecision
from mtp_jax.policies.api import PolicyView, StepStats
from mtp_jax.testing.fake_device import HostModel, numbered_request
from mtp_jax.testing.policies import ScriptedDraftLen
from mtp_jax.testing.strategies import acceptance_masks


def host(
    *, num_slots: int = 2, num_pages: int | None = None, page_size: int = 4, kmax: int = 3, near_limit: str = "row_cap",
    depth: int = 1, chunk: int = 64, max_model_len: int = 32,
) -> HostModel:  # fmt: skip
    return HostModel(
        EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=num_slots,
            cache=CacheConfig(page_size=page_size, num_pages=num_pages),
            speculative=SpeculativeConfig(num_speculative_tokens=kmax, near_limit=near_limit),
            readback_depth=depth,
            prefill_chunk=chunk,
        )
    )


def test_prefills_and_decodes_take_turns() -> None:
    """A long prompt in chunks does not stop those who decode, nor they it."""
    model = host(chunk=4)
    model.submit(numbered_request(0, prompt_len=3, max_tokens=25))
    model.step(3, (0,))
    model.submit(numbered_request(1, prompt_len=16, max_tokens=4))
    kinds = [type(model.step(3, (0,))) for _ in range(7)]
    assert kinds == [StepDecision, PrefillDecision] * 3 + [StepDecision]
    model.finish()


def test_a_prompt_is_cut_into_chunks_that_join() -> None:
    model = host(chunk=5)
    model.submit(numbered_request(0, prompt_len=13, max_tokens=2))
    chunks = [model.step(0, (0,)) for _ in range(3)]
    assert [(c.start, c.num_tokens, c.is_last) for c in chunks if isinstance(c, PrefillDecision)] == [
        (0, 5, False),
        (5, 5, False),
        (10, 3, True),
    ]
    model.finish()


def test_requests_are_admitted_in_order_of_arrival() -> None:
    """The second does not fit beside the first; the third would, and still waits its turn."""
    model = host(num_slots=3, num_pages=8)
    for number, prompt_len in enumerate((20, 20, 2)):
        model.submit(numbered_request(number, prompt_len=prompt_len, max_tokens=4))
    model.step(0, (0,))
    assert [slot.state.request.request_id for slot in model.scheduler.slots] == ["0"]
    model.finish()
    assert list(model.finished) == ["0", "1", "2"]


def test_a_slot_short_of_pages_drafts_less_then_sits_out_then_the_newest_gives_way() -> None:
    """Two slots, pages of one position: the pool runs dry while both decode."""
    model = host(num_pages=31, page_size=1)
    for number in range(2):
        model.submit(numbered_request(number, prompt_len=8, max_tokens=23))
    caps, sat_out = [], 0
    while model.scheduler.totals.num_preemptions == 0:
        decision = model.step(3, (3,))
        model.check()
        if isinstance(decision, StepDecision):
            caps += [decided.draft_cap for decided in decision.slots]
            sat_out += len(decision.slots) == 1 and len(model.scheduler.slots) == 2
    assert min(caps) < 3
    assert sat_out > 0
    assert [slot.state.request.request_id for slot in model.scheduler.slots] == ["0"]  # the older one stayed
    model.finish()


def test_bug_b94_a_small_pool_preempts_often_and_still_ends() -> None:
    model = host(num_slots=4, num_pages=33, page_size=1)
    for number in range(6):
        model.submit(numbered_request(number, prompt_len=3, max_tokens=27))
    steps = 0
    while model.scheduler.has_work:
        model.step(3, (3, 0, 1, 2))
        model.check()
        steps += 1
    model.finish()
    assert model.scheduler.totals.num_preemptions >= 3
    assert steps < 600


@given(
    prompt_len=st.integers(1, 31),
    kmax=st.integers(0, 7),
    depth=st.integers(0, 2),
    near_limit=st.sampled_from(("row_cap", "group_zero")),
)
def test_b01_no_draft_is_asked_for_that_the_limit_forbids(
    prompt_len: int, kmax: int, depth: int, near_limit: str
) -> None:
    model = host(num_slots=1, kmax=kmax, depth=depth, near_limit=near_limit)
    model.submit(numbered_request(0, prompt_len=prompt_len, max_tokens=99))
    while model.scheduler.has_work:
        before = next(iter(model.scheduler.slots), None)
        bound = None if before is None else before.reserved_len
        decision = model.step(kmax, (kmax,))
        model.check()
        if isinstance(decision, StepDecision) and near_limit == "group_zero" and bound is not None:
            is_unsafe = bound + kmax + 1 > 32
            assert decision.shape.draft_len == 0 or not is_unsafe
    model.finish()
    assert model.device.max_position_written < 31


def test_group_zero_turns_all_slots_to_zero_and_row_cap_one() -> None:
    for near_limit, expected in (("group_zero", {0: 0, 1: 0}), ("row_cap", {0: 1, 1: 3})):
        model = host(near_limit=near_limit, depth=0)
        model.submit(numbered_request(0, prompt_len=28, max_tokens=9))
        model.submit(numbered_request(1, prompt_len=4, max_tokens=20))
        model.step(3, (0,))
        decision = model.step(3, (0,))
        while not (isinstance(decision, StepDecision) and len(decision.slots) == 2):
            decision = model.step(3, (0,))
        assert {decided.slot: decided.draft_cap for decided in decision.slots} == expected
        model.finish()


def test_bug_b152_nobody_who_can_use_drafts_means_a_step_without() -> None:
    model = host(depth=0)
    for number in range(2):
        model.submit(numbered_request(number, prompt_len=4, max_tokens=2))
    decision = model.step(3, (0,))
    while not isinstance(decision, StepDecision):
        decision = model.step(3, (0,))
    assert decision.shape.draft_len == 0
    model.finish()


def test_bug_b68_policies_see_decodes_and_not_prefills() -> None:
    seen: list[PolicyView] = []

    class Watching:
        is_voted = True

        def choose(self, view: PolicyView) -> int:
            seen.append(view)
            return 0

        def update(self, stats: StepStats) -> "Watching":
            return self

    model = host(num_slots=3, chunk=4)
    for number, prompt_len in enumerate((3, 24, 24)):
        model.submit(numbered_request(number, prompt_len=prompt_len, max_tokens=6))
    scheduler = model.scheduler
    scheduler.policy = Watching()
    num_decodes = 0
    for _ in range(4):
        launch = model.group.decide()
        decision = None if launch is None else launch.shards[0]
        if isinstance(decision, StepDecision):
            assert seen[-1].num_decoding == len(decision.slots) == 1
            assert seen[-1].step_number == num_decodes
            num_decodes += 1
    assert num_decodes == 2
    assert {view.max_draft_len for view in seen} == {3}


@pytest.mark.parametrize("wish", [-1, 4])
def test_a_policy_outside_its_range_is_our_fault(wish: int) -> None:
    class Wild:
        is_voted = True

        def choose(self, view: PolicyView) -> int:
            return wish

        def update(self, stats: StepStats) -> "Wild":
            return self

    model = host()
    model.submit(numbered_request(0, prompt_len=2, max_tokens=9))
    model.step(0, (0,))
    model.scheduler.policy = Wild()
    with pytest.raises(InvariantError, match=f"draft length {wish}"):
        model.group.decide()


def test_cancelling_reaches_a_request_wherever_it_is() -> None:
    model = host(num_slots=1)
    for number in range(3):
        model.submit(numbered_request(number, prompt_len=4, max_tokens=20))
    model.step(3, (1,))
    model.step(3, (1,))
    assert model.scheduler.cancel("0")  # running, a launch in flight
    assert model.scheduler.cancel("2")  # waiting
    assert not model.scheduler.cancel("2")
    assert not model.scheduler.cancel("never heard of")
    del model.requests["0"], model.requests["2"]
    model.finish()
    assert list(model.finished) == ["1"]


@given(st.data())
def test_bug_b35_every_step_makes_progress(data: st.DataObject) -> None:
    """Within a few turns of the loop somebody gains a token: readback depth, and a prefill for each slot."""
    model = host(num_slots=3, num_pages=20, depth=data.draw(st.integers(0, 2)), page_size=2)
    for number in range(data.draw(st.integers(1, 5))):
        model.submit(
            numbered_request(number, prompt_len=data.draw(st.integers(1, 20)), max_tokens=data.draw(st.integers(1, 12)))
        )
    quiet, num_emitted = 0, 0
    while model.scheduler.has_work:
        model.step(data.draw(st.integers(0, 3)), (data.draw(st.integers(0, 3)),))
        emitted = model.scheduler.totals.num_emitted_tokens
        quiet = 0 if emitted > num_emitted else quiet + 1
        num_emitted = emitted
        assert quiet <= 12
    model.finish()


@given(masks=st.lists(acceptance_masks(3), min_size=1, max_size=8), preempt_at=st.integers(0, 8))
def test_bug_b34_counts_stay_in_bounds_through_preemption(masks: list[tuple[bool, ...]], preempt_at: int) -> None:
    """Whatever is right, and whoever is taken off with a step in flight: 0 <= accepted <= drafted in every record."""
    model = host(num_slots=1, depth=2)
    model.submit(numbered_request(0, prompt_len=2, max_tokens=25))
    for step, mask in enumerate(masks * 4):
        if step == preempt_at:
            model.preempt("0")
        model.step(3, (next((j for j, is_right in enumerate(mask) if not is_right), 3),))
        model.check()
    model.finish()
    state = model.finished["0"].state
    assert all(0 <= record.num_accepted <= len(record.drafts) <= record.draft_cap for record in state.records)
    assert state.metrics.num_accepted_tokens == sum(record.num_accepted for record in state.records)


@pytest.mark.long
def test_bug_b79_ten_thousand_requests_leak_nothing() -> None:
    """Short requests of all kinds, some stopped, some cancelled: at the end every page is free."""
    model = host(num_slots=4, num_pages=40, page_size=2)
    for number in range(10_000):
        model.submit(
            numbered_request(
                number,
                prompt_len=1 + number % 9,
                max_tokens=1 + number % 7,
                stop_after=number % 5 if number % 3 == 0 else None,
            )
        )
        if number % 11 == 0:
            model.cancel(str(number))
        for _ in range(2):
            model.step(number % 4, (number % 5, number % 3))
    model.finish(100_000)


def test_of_a_tree_policies_see_levels_and_counters_see_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two right of three levels: `StepStats` and the lists by position say so, and twelve drafts were verified."""
    model = HostModel(
        EngineConfig(
            max_model_len=64,
            max_num_seqs=1,
            speculative=SpeculativeConfig(method="dynamic_tree", tree_topk=4, tree_nodes=12),
            readback_depth=0,
        )
    )
    seen: list[StepStats] = []

    def update(self: ScriptedDraftLen, stats: StepStats) -> ScriptedDraftLen:
        seen.append(stats)
        return self

    monkeypatch.setattr(ScriptedDraftLen, "update", update)
    model.submit(numbered_request(0, prompt_len=3, max_tokens=30))
    model.step(0, (0,))  # the prompt
    model.step(3, (2,))
    assert [(stats.draft_len, stats.drafted, stats.accepted) for stats in seen] == [(3, (1, 1, 1), (1, 1, 0))]
    totals = model.scheduler.totals
    assert (totals.num_drafts, totals.num_draft_tokens, totals.num_accepted_tokens) == (1, 12, 2)
    assert totals.num_draft_tokens_per_pos == [1, 1, 1]
    assert totals.num_accepted_tokens_per_pos == [1, 1]
    (slot,) = model.scheduler.slots
    assert slot.known_len == slot.reserved_len == 6  # the bound grew by four, and gave back the one not emitted
