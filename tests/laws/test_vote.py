"""The vote, on the host alone: every process launches the same programs, whatever work it has."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.core.config import CacheConfig, EngineConfig, MeshConfig, SpeculativeConfig
from mtp_jax.core.errors import EngineFailed
from mtp_jax.core.shapes import PrefillShape, ShapeGrid, StepShape
from mtp_jax.engine.group import Group
from mtp_jax.engine.vote import Wish, agree, shape_of
from mtp_jax.policies.api import PolicyView
from mtp_jax.policies.fixed import FixedDraftLen
from mtp_jax.policies.gate import AcceptanceGate
from mtp_jax.policies.schedule import ScheduledDraftLen
from mtp_jax.testing.checks import CheckFailed
from mtp_jax.testing.fake_mesh import MeshModel
from mtp_jax.testing.numbered import expected_end, numbered_request
from mtp_jax.testing.policies import ScriptedDraftLen
from mtp_jax.testing.strategies import shards_of_processes, wishes_per_shard


def config_of(
    data: int,
    *,
    depth: int = 1,
    near_limit: str = "row_cap",
    num_pages: int | None = None,
    slots_per_shard: int = 2,
    max_model_len: int = 24,
    max_draft_len: int = 3,
    chunk: int = 8,
) -> EngineConfig:
    return EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=data * slots_per_shard,
        mesh=MeshConfig(data=data),
        cache=CacheConfig(page_size=4, num_pages=num_pages),
        speculative=SpeculativeConfig(num_speculative_tokens=max_draft_len, near_limit=near_limit),
        prefill_chunk=chunk,
        readback_depth=depth,
    )


@st.composite
def meshes(draw: st.DrawFn) -> MeshModel:
    shards_per_process = draw(shards_of_processes())
    data = sum(shards_per_process)
    pages = draw(st.sampled_from((None, 6 * data, 8 * data)))
    config = config_of(
        data,
        depth=draw(st.integers(0, 2)),
        near_limit=draw(st.sampled_from(("row_cap", "group_zero"))),
        num_pages=pages,
        chunk=draw(st.sampled_from((1, 4, 8, 64))),
    )
    return MeshModel(config, shards_per_process, draw(wishes_per_shard(data, 3)), lookahead=draw(st.integers(0, 2)))


@given(mesh=meshes(), data=st.data())
def test_b21_all_processes_launch_the_same_programs(mesh: MeshModel, data: st.DataObject) -> None:
    """Requests near their limits, unequal work, none, late work, preemptions: the model raises where shapes part.

    There are two texts, so prompts share pages within a shard.
    """
    names: list[str] = []
    for _ in range(data.draw(st.integers(1, 14))):
        action = data.draw(st.sampled_from(("submit", "submit", "step", "step", "step", "preempt")))
        process = data.draw(st.integers(0, len(mesh.processes) - 1))
        if action == "submit":
            request = numbered_request(
                100 * len(names) + data.draw(st.sampled_from((0, 60))),
                prompt_len=data.draw(st.integers(1, 23)),
                max_tokens=data.draw(st.integers(1, 12)),
                stop_after=data.draw(st.none() | st.integers(0, 6)),
            )
            mesh.submit(process, request)
            names.append(request.request_id)
        elif action == "step":
            mesh.step(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))
        elif names:
            mesh.preempt(process, data.draw(st.sampled_from(names)))
        mesh.check()
    mesh.finish()
    assert mesh.finished.keys() == set(names)


def test_the_model_sees_a_process_that_goes_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the first process takes its own wishes for the agreement."""
    mesh = MeshModel(config_of(2), (1, 1), [ScriptedDraftLen((3,)), ScriptedDraftLen((1,))])
    for process in range(2):
        mesh.submit(process, numbered_request(process, prompt_len=3, max_tokens=12))
    first = mesh.processes[0].group
    reconcile = first.reconcile
    monkeypatch.setattr(
        first,
        "reconcile",
        lambda result: reconcile(dataclasses.replace(result, agreed=result.launch.wishes[0])),
    )
    with pytest.raises(CheckFailed, match="different programs"):
        mesh.finish()


@given(data=st.data(), depth=st.integers(0, 2), lookahead=st.integers(0, 2))
def test_processes_that_share_a_data_shard_keep_the_same_books(data: st.DataObject, depth: int, lookahead: int) -> None:
    """Their books are functions of requests and records alone: two that are told the same hold the same pages."""
    config = config_of(2, depth=depth, num_pages=14, chunk=4)
    twins = [MeshModel(config, (1, 1), lookahead=lookahead) for _ in range(2)]
    names: list[str] = []
    for _ in range(data.draw(st.integers(1, 14))):
        action = data.draw(st.sampled_from(("submit", "step", "step", "preempt")))
        process = data.draw(st.integers(0, 1))
        if action == "submit":
            names.append(str(100 * len(names) + data.draw(st.integers(0, 1))))
            length = data.draw(st.integers(1, 20))
            for mesh in twins:
                mesh.submit(process, numbered_request(int(names[-1]), prompt_len=length, max_tokens=6))
        elif action == "step":
            num_right = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
            for mesh in twins:
                mesh.step(num_right)
        elif names:
            name = data.draw(st.sampled_from(names))
            for mesh in twins:
                mesh.preempt(process, name)
        assert tables_of(twins[0]) == tables_of(twins[1])
    for mesh in twins:
        mesh.finish()
    assert twins[0].launched == twins[1].launched


def tables_of(mesh: MeshModel) -> list[tuple[int, tuple[int, ...], int, int, int]]:
    return [
        (slot.index, tuple(slot.pages), slot.prefilled, slot.known_len, slot.reserved_len)
        for process in mesh.processes
        for shard in process.group.shards
        for slot in shard.slots
    ]


def test_b16_a_shard_whose_drafts_are_refused_turns_drafting_off_for_the_group() -> None:
    """With probes that all shards make together, and on again; its neighbour would draft all the time."""
    config = config_of(2, depth=1, max_draft_len=3, max_model_len=400, chunk=64)
    gate = AcceptanceGate(FixedDraftLen(), disable_below=0.5, window=8, probe_every=4)
    mesh = MeshModel(config, (1, 1), [gate, FixedDraftLen()])
    for process in range(2):
        mesh.submit(process, numbered_request(process, prompt_len=2, max_tokens=380))
    for _ in range(30):
        mesh.step((0,))
    lengths = draft_lens(mesh)
    assert lengths[:8] == [3] * 8
    assert lengths[-8:] in ([0, 0, 0, 1] * 2, [0, 0, 1, 0] * 2, [0, 1, 0, 0] * 2, [1, 0, 0, 0] * 2)
    while 3 not in draft_lens(mesh)[len(lengths) :]:
        mesh.step((3,))  # right from now on: the probes say so
    mesh.finish()


def draft_lens(mesh: MeshModel) -> list[int]:
    return [shape.draft_len for shape in mesh.launched if isinstance(shape, StepShape)]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_b02_divergent_wishes_agree_on_the_smaller(depth: int) -> None:
    config = config_of(2, depth=depth, max_draft_len=4, max_model_len=60)
    mesh = MeshModel(config, (1, 1), [ScriptedDraftLen((4,)), ScriptedDraftLen((2,))])
    for process in range(2):
        mesh.submit(process, numbered_request(process, prompt_len=2, max_tokens=40))
    for _ in range(10):
        mesh.step((4,))
    assert set(draft_lens(mesh)) == {2}
    mesh.finish()


def test_b02_one_row_near_its_limit_turns_the_group_to_zero() -> None:
    """Under `group_zero` only; under `row_cap` that row alone drafts less."""
    for near_limit, others in (("group_zero", {0}), ("row_cap", {3})):
        config = config_of(2, near_limit=near_limit, max_model_len=64, max_draft_len=3, chunk=64)
        mesh = MeshModel(config, (1, 1))
        mesh.submit(0, numbered_request(0, prompt_len=60, max_tokens=9))  # L - 4: four tokens may not fit
        mesh.submit(1, numbered_request(1, prompt_len=4, max_tokens=40))
        while "0" not in mesh.finished:
            mesh.step((0,))
        near = mesh.finished["0"].state
        assert set(near.metrics.draft_lens) == others, near_limit
        far = mesh.processes[1].group.shards[0].slots.of_request("1")
        assert far is not None
        while "1" not in mesh.finished:
            mesh.step((3,))
        assert mesh.finished["1"].state.metrics.draft_lens[-1] == 3 or near_limit == "row_cap"
        mesh.finish()
        for number, prompt_len, max_tokens in ((0, 60, 9), (1, 4, 40)):
            wanted = expected_end(numbered_request(number, prompt_len=prompt_len, max_tokens=max_tokens), 64)[0]
            assert tuple(mesh.finished[str(number)].state.tokens) == wanted


def test_b03_idle_shards_abstain_and_a_zero_counts() -> None:
    schedule = ScheduledDraftLen(((4, 3), (8, 2)))
    grid = ShapeGrid((8,), 3, (16,))

    def shape(*wishes: Wish, policy: ScheduledDraftLen | FixedDraftLen | ScriptedDraftLen) -> object:
        return shape_of(agree(wishes), grid, policy, after_prefill=False, step_number=0)

    five = Wish(alive=True, num_slots=5, draft_len=3, useful_drafts=3, num_decoding=5)
    idle = Wish()
    assert shape(five, idle, policy=schedule) == StepShape(8, 2)
    one = dataclasses.replace(five, num_slots=1, num_decoding=1)
    assert shape(one, five, policy=schedule) == StepShape(8, 2)  # by the largest shard's batch
    zero = dataclasses.replace(five, draft_len=0)
    assert shape(zero, five, policy=FixedDraftLen()) == StepShape(8, 0)
    assert shape(idle, idle, policy=FixedDraftLen()) is None
    prefilling = Wish(alive=True, chunk=7)
    assert shape(prefilling, five, policy=FixedDraftLen()) == PrefillShape(16)
    assert shape(prefilling, idle, policy=FixedDraftLen()) == PrefillShape(16)


@pytest.mark.parametrize("is_gated", [False, True])
def test_a_schedule_is_asked_about_the_largest_batch_behind_a_gate_too(is_gated: bool) -> None:
    """Not monotone: one shard with 3 requests would say 1, the other with 6 says 2, and that is what runs."""
    schedule = ScheduledDraftLen(((2, 3), (4, 1), (8, 2)))
    policy = AcceptanceGate(schedule, disable_below=0.1) if is_gated else schedule
    mesh = MeshModel(config_of(2, max_model_len=60, slots_per_shard=8), (1, 1), [policy, policy])
    for number in range(9):
        mesh.submit(number // 3 and 1, numbered_request(number, prompt_len=2, max_tokens=30))
    while not mesh.finished:
        mesh.step((3,))
        sizes = [len(process.group.shards[0].slots) for process in mesh.processes]
        if sizes == [3, 6] and all(slot.num_in_flight for p in mesh.processes for slot in p.group.shards[0].slots):
            break
    before = len(draft_lens(mesh))
    for _ in range(4):
        mesh.step((3,))
    assert draft_lens(mesh)[before:] == [2] * 4
    mesh.finish()


def test_a_policy_is_told_of_the_program_that_runs_and_not_of_its_shards_own() -> None:
    """One request here, eight there: the step that both run has eight slots, and so its cost is that of eight."""
    seen: list[int] = []

    @dataclasses.dataclass(frozen=True)
    class Watching(ScriptedDraftLen):
        def choose(self, view: PolicyView) -> int:
            seen.append(view.slot_bucket)
            return super().choose(view)

    config = config_of(2, max_model_len=60, slots_per_shard=8)
    mesh = MeshModel(config, (1, 1), [Watching((1,)), ScriptedDraftLen((1,))])
    mesh.submit(0, numbered_request(0, prompt_len=2, max_tokens=40))
    for number in range(1, 9):
        mesh.submit(1, numbered_request(number, prompt_len=2, max_tokens=30))
    while not mesh.finished:
        mesh.step((0,))
    assert seen[0] == 1
    assert seen[-1] == 8
    mesh.finish()
    assert seen[-1] == 1  # alone in the end


def test_a_slot_at_its_end_takes_nobodys_drafts() -> None:
    """Its own cap falls to zero; the others' K does not."""
    mesh = MeshModel(config_of(2, max_model_len=60), (1, 1))
    mesh.submit(0, numbered_request(0, prompt_len=4, max_tokens=40))
    for number in range(1, 9):
        mesh.submit(1, numbered_request(number, prompt_len=4, max_tokens=2))
    while "0" not in mesh.finished:
        mesh.step((0,))
    lens = mesh.finished["0"].state.metrics.draft_lens
    assert set(lens[:-4]) == {3}
    mesh.finish()


def test_several_shards_need_a_vote() -> None:
    config = config_of(2)
    with pytest.raises(Exception, match="must vote"):
        Group(config, ShapeGrid.of(config), FixedDraftLen, num_shards=2)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_process_without_work_launches_until_nobody_is_alive(depth: int) -> None:
    mesh = MeshModel(config_of(2, depth=depth), (1, 1))
    mesh.submit(0, numbered_request(0, prompt_len=3, max_tokens=5))
    mesh.finish()
    assert not any(process.group.is_running for process in mesh.processes)
    num_launches = len(mesh.launched)
    mesh.finish()  # an empty start: the first steps, and the agreement that nobody is alive
    assert len(mesh.launched) == num_launches + depth + 1


@given(mesh=meshes(), num_steps=st.integers(0, 30), data=st.data())
def test_when_a_process_is_gone_what_had_finished_is_whole(
    mesh: MeshModel, num_steps: int, data: st.DataObject
) -> None:
    for number in range(6):
        mesh.submit(number % len(mesh.processes), numbered_request(number, prompt_len=1 + number, max_tokens=6))
    for _ in range(num_steps):
        mesh.step((2, 0))
    mesh.crash(data.draw(st.integers(0, len(mesh.processes) - 1)))
    with pytest.raises(EngineFailed, match="gone"):
        mesh.step()
    for name, progress in mesh.finished.items():  # each was compared with its whole text when it ended
        assert len(progress.state.tokens) == 6, name
