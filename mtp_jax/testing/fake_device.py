"""The host's books against a device made of stamps: the engine's loop without jax, acceptance given by the test.

A page position holds a stamp instead of keys and values: a hash of all tokens up to it, as real keys and values depend
on all of them. Before a slot's step its stamps are compared with its text, so a page lost, shared, given away too early
or written past its owner's right is seen at the first step that reads it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mtp_jax.core.config import EngineConfig
from mtp_jax.core.shapes import ShapeGrid
from mtp_jax.core.topology import CHAIN as CHAIN
from mtp_jax.core.topology import Topology
from mtp_jax.core.topology import Tree as Tree
from mtp_jax.engine.decisions import Decision, PrefillDecision, SlotDecision, StepDecision
from mtp_jax.engine.group import Group
from mtp_jax.engine.requests import Progress, Request
from mtp_jax.engine.results import SlotResult, StepResult
from mtp_jax.engine.scheduler import Scheduler
from mtp_jax.engine.slots import Slot
from mtp_jax.testing.checks import check_pages, check_seats, require
from mtp_jax.testing.numbered import STOP_ID, VOCAB_SIZE, Outcomes, text_token
from mtp_jax.testing.numbered import numbered_request as numbered_request
from mtp_jax.testing.policies import ScriptedDraftLen


@dataclass
class _DeviceSlot:
    """A row of the device state."""

    committed_len: int = 0
    pending_token: int = 0
    finished: bool = True


class FakeDevice:
    """Runs launches in order, each at once, on the pages that the host's tables name at launch."""

    def __init__(self, config: EngineConfig) -> None:
        self._page_size = config.cache.page_size
        self._topology = config.topology
        self._stamps: dict[tuple[int, int], int] = {}
        self.slots = [_DeviceSlot() for _ in range(config.max_num_seqs)]
        self.max_position_written = -1

    def run(self, decision: Decision, slots: Sequence[Slot], num_right: Sequence[int]) -> StepResult:
        """The result of a launch. `num_right[i]` drafts of the i-th decided slot are right, as far as it drafts.

        Drafts of a tree hang as `comb` says.
        """
        by_index = {slot.index: slot for slot in slots}
        if isinstance(decision, PrefillDecision):
            return StepResult(decision, (self._prefill(decision, by_index[decision.slot]),))
        results = [
            self._decode(decision.shape.draft_len, decided, by_index[decided.slot], right)
            for decided, right in zip(decision.slots, num_right, strict=True)
        ]
        return StepResult(decision, tuple(results))

    def _prefill(self, decision: PrefillDecision, slot: Slot) -> SlotResult:
        row = self.slots[slot.index]
        end = decision.start + decision.num_tokens
        self._check_reads(slot, decision.start)
        for position in range(decision.start, end):
            self._write(slot, position, slot.prompt[: position + 1])
        row.committed_len, row.finished = end, True
        if not decision.is_last:
            return _nothing(0)
        token = _text(slot, end)
        if slot.pending_token is not None:
            require(slot.pending_token == token, f"resumed with token {slot.pending_token}, the text has {token}")
        row.pending_token = token
        is_drawn = slot.pending_token is None
        row.finished = is_drawn and (token == STOP_ID or end >= slot.state.limit)
        return SlotResult((token,) if is_drawn else (), 0, 0, 0, end, row.finished, (), (token,))

    def _decode(self, draft_len: int, decided: SlotDecision, slot: Slot, num_right: int) -> SlotResult:
        row = self.slots[slot.index]
        start, limit = row.committed_len, slot.state.limit
        if row.finished:
            return _nothing(start)
        self._check_reads(slot, start)
        cap = min(decided.draft_cap, self._topology.num_drafts(draft_len), max(limit - start - 1, 0))
        parents = comb(self._topology, draft_len)
        path = _right_path(parents[:cap], num_right)
        depths = _depths(parents)
        target = [_text(slot, start + depth + 1) for depth in depths]
        drafts = [
            _text(slot, start + depths[row]) if row in path else (_text(slot, start + depths[row]) + row) % VOCAB_SIZE
            for row in range(1, len(depths))
        ]
        self._write_rows(slot, start, [row.pending_token, *drafts[:cap]], parents[:cap])
        self._reach(slot, min(start + self._topology.num_positions(draft_len, decided.draft_cap), limit) - 1)
        emitted = [target[row] for row in path][: limit - start]
        if STOP_ID in emitted:
            emitted = emitted[: emitted.index(STOP_ID) + 1]
        for place, source in enumerate(path[: len(emitted)]):
            self._stamps[self._address(slot, start + place)] = self._stamps[self._address(slot, start + source)]
        row.committed_len += len(emitted)
        row.pending_token = emitted[-1]
        row.finished = emitted[-1] == STOP_ID or row.committed_len >= limit
        return SlotResult(
            tokens=tuple(emitted),
            num_accepted=min(len(path) - 1, len(emitted)),
            num_drafted=cap,
            draft_depth=max(depths[: cap + 1]),
            committed_len=row.committed_len,
            finished=row.finished,
            drafts=tuple(drafts),
            target_tokens=tuple(target),
            parents=parents if self._topology.is_tree else None,
        )

    def _write_rows(self, slot: Slot, start: int, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Each row's stamp: of the text, and of the rows on the way to it."""
        prefixes = [[*_texts(slot, start), tokens[0]]]
        prefixes += [[]] * len(parents)
        for row, parent in enumerate(parents, start=1):
            prefixes[row] = [*prefixes[parent], tokens[row]]
        for row, prefix in enumerate(prefixes):
            self._write(slot, start + row, prefix)

    def _reach(self, slot: Slot, position: int) -> None:
        """The drafter's entries go as far as this; what they hold is nobody's concern after the step."""
        self._address(slot, position)
        self.max_position_written = max(self.max_position_written, position)

    def _check_reads(self, slot: Slot, length: int) -> None:
        text = _texts(slot, length)
        for position in range(length):
            stamp = self._stamps.get(self._address(slot, position))
            require(
                stamp == hash(tuple(text[: position + 1])),
                f"slot {slot.index} reads position {position} and finds another text there",
            )

    def _write(self, slot: Slot, position: int, tokens: Sequence[int]) -> None:
        self._stamps[self._address(slot, position)] = hash(tuple(tokens))
        self.max_position_written = max(self.max_position_written, position)

    def _address(self, slot: Slot, position: int) -> tuple[int, int]:
        entry = position // self._page_size
        require(
            entry < len(slot.pages),
            f"slot {slot.index} needs position {position}; its {len(slot.pages)} pages of {self._page_size} end before",
        )
        return slot.pages[entry], position % self._page_size


class ShardModel:
    """One data shard's books and a `FakeDevice`: launches run at once, results wait until they are read."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.device = FakeDevice(scheduler.config)
        self.in_flight: deque[StepResult | None] = deque()  # None: a launch in which the shard had no part

    def launch(self, decision: Decision | None, num_right: Sequence[int]) -> None:
        """Runs the shard's part of a launch. `num_right[i % len(num_right)]` drafts of its i-th slot are right."""
        if decision is None:
            self.in_flight.append(None)
            return
        if isinstance(decision, StepDecision):
            self._check_decision(decision)
            num_right = [num_right[i % len(num_right)] for i in range(len(decision.slots))]
        self.in_flight.append(self.device.run(decision, list(self.scheduler.slots), num_right))

    def check(self) -> None:
        """The books, and the host's bounds against the device's true lengths."""
        check_pages(self.scheduler)
        for slot in self.scheduler.slots:
            in_flight = self._num_in_flight(slot)
            require(
                slot.num_in_flight == in_flight,
                f"slot {slot.index} counts {slot.num_in_flight} launches in flight; there are {in_flight}",
            )
            row = self.device.slots[slot.index]
            if not slot.is_prefilled:
                continue
            require(
                slot.known_len <= row.committed_len <= slot.reserved_len,
                f"slot {slot.index}: committed_len {row.committed_len} is outside "
                f"{slot.known_len}..{slot.reserved_len}",
            )
            require(
                row.finished or slot.known_len + in_flight <= row.committed_len,
                f"slot {slot.index}: a launch in flight emitted nothing",
            )

    def _check_decision(self, decision: StepDecision) -> None:
        require(bool(decision.slots), "a launch for nobody")
        for decided in decision.slots:
            slot = self.scheduler.slots.find(decided.slot, decided.admission)
            require(slot is not None, f"a launch for slot {decided.slot}, which changed hands")
            require(decided.slot < decision.shape.slots, f"slot {decided.slot} is outside {decision.shape}")
            num_drafts = self.scheduler.config.topology.num_drafts(decision.shape.draft_len)
            require(0 <= decided.draft_cap <= num_drafts, f"{decided} under {decision.shape}")
            assert slot is not None
            require(decided.num_pages == len(slot.pages), f"{decided} does not name the pages held")
            require(
                slot.known_len + self._num_in_flight(slot) + decided.draft_cap < slot.state.limit,
                f"slot {slot.index}: what is in flight leaves less than {decided.draft_cap + 1} tokens to emit",
            )

    def _num_in_flight(self, slot: Slot) -> int:
        return sum(
            (decided.slot, decided.admission) == (slot.index, slot.admission)
            for result in self.in_flight
            if result is not None and isinstance(result.decision, StepDecision)
            for decided in result.decision.slots
        )


class HostModel:
    """`Engine.step` with a `FakeDevice`: the scheduler, its books and a readback queue of any depth.

    `lookahead`: that of a proposer, see `engine.prefixes`.
    """

    def __init__(self, config: EngineConfig, *, lookahead: int = 0) -> None:
        self.config = config
        self.group = Group(config, ShapeGrid.of(config), lambda: ScriptedDraftLen((0,)), lookahead=lookahead)
        self.scheduler = self.group.shards[0]
        self._shard = ShardModel(self.scheduler)
        self.device = self._shard.device
        self._outcomes = Outcomes(config)

    @property
    def requests(self) -> dict[str, Request]:
        """Submitted and not cancelled, by id."""
        return self._outcomes.requests

    @property
    def finished(self) -> dict[str, Progress]:
        """How they ended, by id."""
        return self._outcomes.finished

    def submit(self, request: Request) -> None:
        """Queues a `numbered_request`; it must fit the pool, as admission would check."""
        self.requests[request.request_id] = request
        self.group.submit(request)

    def cancel(self, request_id: str) -> None:
        """Drops a request, wherever it is."""
        if self.group.cancel(request_id):
            del self.requests[request_id]

    def preempt(self, request_id: str) -> None:
        """Takes a request off the device, if it is on it."""
        self.group.preempt(request_id)

    def step(self, draft_len: int, num_right: Sequence[int]) -> Decision | None:
        """One turn of the loop: at most one launch, then the results that are due.

        `draft_len` is what the policy says; `num_right[i % len(num_right)]` goes to the i-th slot of the launch.
        """
        self.scheduler.policy = ScriptedDraftLen((draft_len,))
        launch = self.group.decide()
        decision = None if launch is None else launch.shards[0]
        if decision is not None:
            self._shard.launch(decision, num_right)
        is_idle = decision is None
        in_flight = self._shard.in_flight
        while len(in_flight) > self.config.readback_depth or (is_idle and in_flight):
            self._reconcile(in_flight.popleft())
            is_idle = False
        return decision

    def finish(self, max_steps: int = 10_000) -> None:
        """Steps until nobody is left, every draft wrong; then reads what is in flight; all must be given back."""
        while self.scheduler.has_work:
            self.step(self.config.max_draft_len, (0,))
            self.check()
            max_steps -= 1
            require(max_steps > 0, "the requests do not come to an end")
        while self._shard.in_flight:
            self._reconcile(self._shard.in_flight.popleft())
        self.check()
        require(not self.scheduler.pool.held, f"pages {sorted(self.scheduler.pool.held)} were never given back")
        require(set(self.finished) == set(self.requests), "a request was lost")

    def check(self) -> None:
        """The books, and the host's bounds against the device's true lengths."""
        self._shard.check()
        check_seats(self.group)

    def _reconcile(self, result: StepResult | None) -> None:
        assert result is not None
        for progress in self.scheduler.reconcile(result):
            self._outcomes.take(progress)


def comb(topology: Topology, draft_len: int) -> tuple[int, ...]:
    """Parents of a step's drafts. Of a tree: the last draft of each level goes on, those before it have no children.

    >>> comb(CHAIN, 3), comb(Tree(max_draft_len=3, topk=2, nodes=7), 3)
    ((0, 1, 2), (0, 0, 0, 3, 3, 5, 5))
    """
    num_spare = topology.num_drafts(draft_len) - draft_len
    parents: list[int] = []
    for level in range(draft_len):
        num_spare_here = num_spare // draft_len + (level < num_spare % draft_len)
        parents += [len(parents)] * (num_spare_here + 1)
    return tuple(parents)


def _right_path(parents: Sequence[int], num_right: int) -> list[int]:
    """Rows of the first `num_right` levels that go on, as far as they are there, row 0 first."""
    path = [0]
    while len(path) <= num_right and path[-1] in parents:
        path.append(max(row for row, parent in enumerate(parents, start=1) if parent == path[-1]))
    return path


def _depths(parents: Sequence[int]) -> list[int]:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths


def _text(slot: Slot, position: int) -> int:
    request = slot.state.request
    return text_token(int(request.request_id), position, request.seed)


def _texts(slot: Slot, length: int) -> list[int]:
    return [_text(slot, position) for position in range(length)]


def _nothing(committed_len: int) -> SlotResult:
    return SlotResult((), 0, 0, 0, committed_len, False, (), ())
