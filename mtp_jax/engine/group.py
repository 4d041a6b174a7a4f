"""The data shards that this process schedules: one queue for all of them, and each launch's shape.

A process alone with one data shard decides each launch when it makes it. Any other takes part in a vote: it launches
what was agreed d + 1 launches ago (d: readback depth), work or no work, until the group agrees that nobody is alive.
Everything here is a function of requests, agreements and records, never of clocks, so that processes which schedule
the same data shard reach the same decisions.
"""

from collections import deque
from collections.abc import Callable, Iterator

from mtp_jax.core.config import EngineConfig
from mtp_jax.core.errors import InvariantError
from mtp_jax.core.shapes import PrefillShape, Shape, ShapeGrid, StepShape
from mtp_jax.engine.decisions import LaunchDecision
from mtp_jax.engine.requests import Progress, Request, RequestState
from mtp_jax.engine.results import LaunchResult
from mtp_jax.engine.scheduler import Scheduler, Totals
from mtp_jax.engine.slots import Slot
from mtp_jax.engine.vote import EVERYTHING, LaunchNeeds, Wish, shape_of, start_shape
from mtp_jax.policies.api import DraftLenPolicy


class Group:
    """`num_shards` data shards scheduled by this process. `is_voting`: other shards or processes launch with them."""

    def __init__(
        self,
        config: EngineConfig,
        grid: ShapeGrid,
        make_policy: Callable[[], DraftLenPolicy],
        *,
        num_shards: int = 1,
        is_voting: bool = False,
        lookahead: int = 0,
    ) -> None:
        if num_shards > 1 and not is_voting:
            raise InvariantError(f"{num_shards} data shards must vote")
        self.grid = grid
        self.is_voting = is_voting
        self.totals = Totals()
        self.waiting: deque[RequestState] = deque()
        self.shards = tuple(
            Scheduler(config, grid, make_policy(), lookahead=lookahead, waiting=self.waiting, totals=self.totals)
            for _ in range(num_shards)
        )
        self._depth = config.readback_depth
        self.num_launches = 0  # over the group's life
        self._num_decodes = 0
        self.last_draft_len = 0  # of the last decode step that was launched, for those who look on
        self.prefills_first = False  # no decode step while a prompt waits: for measurements that fill a batch first
        self._last_bucket = 1  # slots of the last decode step
        self._after_prefill = False
        self._is_running = False  # launching by votes; without a vote it stays False
        self._start = 0  # number of the first launch since the last start
        self._agreed: dict[int, Wish] = {}  # by the number of the launch that the wishes travelled with
        self._prefills_coming: list[deque[bool]] = [deque() for _ in range(num_shards)]

    @property
    def has_work(self) -> bool:
        """Some request is not finished."""
        return bool(self.waiting) or any(len(shard.slots) for shard in self.shards)

    @property
    def is_running(self) -> bool:
        """The vote goes on: a launch is due, whether this process has work or not."""
        return self._is_running

    def submit(self, request: Request) -> RequestState:
        """Queues an admissible request (see `engine.admission`)."""
        return self.shards[0].submit(request)

    def cancel(self, request_id: str) -> bool:
        """Drops a request, waiting or running; False if it is not here."""
        return any(shard.cancel(request_id) for shard in self.shards)

    def find(self, request_id: str) -> tuple[Scheduler, Slot] | None:
        """The shard and the slot that a running request holds."""
        for shard in self.shards:
            slot = shard.slots.of_request(request_id)
            if slot is not None:
                return shard, slot
        return None

    def preempt(self, request_id: str) -> bool:
        """Takes a running request off the device; False if it is not running."""
        found = self.find(request_id)
        if found is not None:
            found[0].preempt(found[1])
        return found is not None

    def start(self) -> None:
        """Begins to take part in votes, with or without work; every process of the mesh must."""
        if self.is_voting and not self._is_running:
            self._is_running, self._after_prefill = True, False
            self._start = self.num_launches
            self._agreed.clear()
            self._prefills_coming = [deque([True] * self._depth) for _ in self.shards]  # by `start_shape`

    # ---- the decision

    def decide(self) -> LaunchDecision | None:
        """The next launch; None when there is nothing to launch until a result is read, or the vote has ended."""
        self._admit()
        for shard in self.shards:
            shard.find_prefix()
        return self._decide_by_vote() if self.is_voting else self._decide_alone()

    def _admit(self) -> None:
        """Seats requests in the order of the queue, each in the shard with the fewest."""
        while self.waiting and any(shard.admit_next() for shard in self._emptiest_first()):
            pass

    def _emptiest_first(self) -> Iterator[Scheduler]:
        return iter(sorted(self.shards, key=lambda shard: len(shard.slots)))

    def _decide_alone(self) -> LaunchDecision | None:
        (shard,) = self.shards
        wish = shard.wish(num_ahead=0, num_prefills_coming=0, step_number=self._num_decodes)
        if wish.num_decoding == 0 and wish.chunk == 0:
            return None
        shape = self._shape_of(wish)
        decision = None if shape is None else shard.decide_within(shape, self.num_launches + 1, EVERYTHING)
        if shape is None or decision is None:
            return None
        self._count(shape)
        needs = LaunchNeeds(wish.whole_logits, wish.logprobs, wish.prompt_logprobs)
        return LaunchDecision(self.num_launches, shape, (decision,), needs=needs)

    def _decide_by_vote(self) -> LaunchDecision | None:
        if self.has_work:
            self.start()
        if not self._is_running:
            return None
        shape, needs = self._agreed_launch()
        if shape is None:
            self._is_running = False
            return None
        number = self.num_launches + 1
        shards = tuple(shard.decide_within(shape, number, needs) for shard in self.shards)
        self._count(shape)
        wishes = tuple(map(self._wish, self.shards, self._prefills_coming))
        return LaunchDecision(number, shape, shards, wishes, needs)

    def _agreed_launch(self) -> tuple[Shape | None, LaunchNeeds]:
        """By the wishes of the launch d + 1 before this one; of the first d + 1 since the start by configuration."""
        if self.num_launches - self._start <= self._depth:
            return start_shape(self.grid), EVERYTHING
        source = self.num_launches - self._depth
        agreed = self._agreed.pop(source, None)
        if agreed is None:
            raise InvariantError(f"launch {self.num_launches + 1} needs the record of launch {source}, not yet read")
        return self._shape_of(agreed), LaunchNeeds(agreed.whole_logits, agreed.logprobs, agreed.prompt_logprobs)

    def _shape_of(self, agreed: Wish) -> Shape | None:
        policy = self.shards[0].policy
        after_prefill = self._after_prefill and not self.prefills_first
        return shape_of(agreed, self.grid, policy, after_prefill=after_prefill, step_number=self._num_decodes)

    def _wish(self, shard: Scheduler, prefills_coming: deque[bool]) -> Wish:
        """The shard's wish for the step d + 1 launches after this one; it counts the prefills it asked for already."""
        while len(prefills_coming) > self._depth:
            prefills_coming.popleft()
        wish = shard.wish(
            num_ahead=self._depth,
            num_prefills_coming=sum(prefills_coming),
            step_number=self._num_decodes,
            group_bucket=self._last_bucket,
        )
        prefills_coming.append(wish.chunk > 0)
        return wish

    def _count(self, shape: Shape) -> None:
        self.num_launches += 1
        self._after_prefill = isinstance(shape, PrefillShape)
        if isinstance(shape, StepShape):
            self._num_decodes += 1
            self.last_draft_len = shape.draft_len
            self._last_bucket = shape.slots

    # ---- reconciliation

    def reconcile(self, result: LaunchResult) -> list[Progress]:
        """Settles a launch's results, each shard's by its own record."""
        number = result.launch.number
        if result.agreed is not None and number > self._start:
            self._agreed[number] = result.agreed
        return [
            progress
            for shard, part in zip(self.shards, result.shards, strict=True)
            if part is not None
            for progress in shard.reconcile(part)
        ]
