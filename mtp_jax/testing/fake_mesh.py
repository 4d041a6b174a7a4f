"""Several processes of a mesh without devices: their groups, a `FakeDevice` for each data shard, and the vote.

    mesh = MeshModel(config, shards_per_process=(1, 2))
    mesh.submit(0, request)
    mesh.finish()

The model launches for all processes at once, as a collective would make them wait for each other, and raises
`CheckFailed` if two of them would launch different programs.
"""

from collections import deque
from collections.abc import Sequence

from mtp_jax.core.config import EngineConfig
from mtp_jax.core.errors import EngineFailed
from mtp_jax.core.shapes import Shape, ShapeGrid
from mtp_jax.engine.decisions import LaunchDecision
from mtp_jax.engine.group import Group
from mtp_jax.engine.requests import Progress, Request
from mtp_jax.engine.results import LaunchResult
from mtp_jax.engine.vote import Wish, agree
from mtp_jax.policies.api import DraftLenPolicy
from mtp_jax.policies.fixed import FixedDraftLen
from mtp_jax.testing.checks import CheckFailed, check_seats
from mtp_jax.testing.fake_device import ShardModel
from mtp_jax.testing.numbered import Outcomes


class ProcessModel:
    """One process: its group, its shards' devices, and the launches in flight."""

    def __init__(
        self, config: EngineConfig, num_shards: int, policies: Sequence[DraftLenPolicy], lookahead: int = 0
    ) -> None:
        each = iter(policies)
        self.group = Group(
            config,
            ShapeGrid.of(config),
            lambda: next(each),
            num_shards=num_shards,
            is_voting=True,
            lookahead=lookahead,
        )
        self.shards = tuple(map(ShardModel, self.group.shards))
        self.outcomes = Outcomes(config)
        self.in_flight: deque[tuple[LaunchDecision, Wish]] = deque()

    def read_oldest(self) -> None:
        """Reads one launch's results."""
        launch, agreed = self.in_flight.popleft()
        parts = tuple(shard.in_flight.popleft() for shard in self.shards)
        for progress in self.group.reconcile(LaunchResult(launch, parts, agreed)):
            self.outcomes.take(progress)

    def check(self) -> None:
        """The books of every shard."""
        for shard in self.shards:
            shard.check()
        check_seats(self.group)


class MeshModel:
    """`policies[i]` is the policy of data shard i, over all processes; by default every shard wants Kmax."""

    def __init__(
        self,
        config: EngineConfig,
        shards_per_process: Sequence[int],
        policies: Sequence[DraftLenPolicy] | None = None,
        *,
        lookahead: int = 0,
    ) -> None:
        if sum(shards_per_process) != config.mesh.data:
            raise ValueError(f"{shards_per_process} shards of processes for a mesh of {config.mesh.data}")
        self.config = config
        self.launched: list[Shape] = []
        self._crashed: int | None = None
        policies = list(policies or [FixedDraftLen()] * config.mesh.data)
        self.processes: list[ProcessModel] = []
        for num_shards in shards_per_process:
            self.processes.append(ProcessModel(config, num_shards, policies[:num_shards], lookahead))
            del policies[:num_shards]

    @property
    def has_work(self) -> bool:
        """Some process has an unfinished request, or votes on."""
        return any(process.group.has_work or process.group.is_running for process in self.processes)

    @property
    def finished(self) -> dict[str, Progress]:
        """How requests ended, of all processes."""
        return {name: end for process in self.processes for name, end in process.outcomes.finished.items()}

    def submit(self, process: int, request: Request) -> None:
        """Queues a `numbered_request` at one process."""
        self.processes[process].outcomes.requests[request.request_id] = request
        self.processes[process].group.submit(request)

    def preempt(self, process: int, request_id: str) -> None:
        """Takes a request off its device, if it is on it."""
        self.processes[process].group.preempt(request_id)

    def crash(self, process: int) -> None:
        """The process is gone: nobody can launch any more. What had finished elsewhere stays finished."""
        self._crashed = process

    def start(self) -> None:
        """Every process begins to launch, with or without work."""
        for process in self.processes:
            process.group.start()

    def step(self, num_right: Sequence[int] = (0,)) -> Shape | None:
        """One launch of all processes, then the results that are due; the shape launched, None when the vote ended."""
        if self._crashed is not None:
            raise EngineFailed(f"process {self._crashed} is gone")
        if self.has_work:
            self.start()
        decisions = [process.group.decide() for process in self.processes]
        shapes = {None if decision is None else decision.shape for decision in decisions}
        if len(shapes) > 1:
            raise CheckFailed(f"the processes would launch different programs: {shapes}")
        (shape,) = shapes
        if shape is None:
            for process in self.processes:
                while process.in_flight:
                    process.read_oldest()
            return None
        self.launched.append(shape)
        self._launch([decision for decision in decisions if decision is not None], num_right)
        for process in self.processes:
            while len(process.in_flight) > self.config.readback_depth:
                process.read_oldest()
        return shape

    def finish(self, max_steps: int = 10_000) -> None:
        """Steps until the group agrees that nobody is alive; then nothing may be left of anything.

        A request may have come after its process said for the last time that it has none: the vote begins again for it.
        """
        self.start()
        while self.step() is not None or self.has_work:
            self.check()
            max_steps -= 1
            if max_steps == 0:
                raise CheckFailed("the requests do not come to an end")
        for process in self.processes:
            process.check()
            for shard in process.group.shards:
                if shard.pool.held:
                    raise CheckFailed(f"pages {sorted(shard.pool.held)} were never given back")
            if process.outcomes.finished.keys() != process.outcomes.requests.keys():
                raise CheckFailed("a request was lost")

    def check(self) -> None:
        """Everybody's books."""
        for process in self.processes:
            process.check()

    def _launch(self, decisions: Sequence[LaunchDecision], num_right: Sequence[int]) -> None:
        if len({decision.number for decision in decisions}) > 1:
            raise CheckFailed("the processes number their launches differently")
        if len({decision.needs for decision in decisions}) > 1:
            raise CheckFailed("the processes differ in what the launch must compute")
        agreed = agree([wish for decision in decisions for wish in decision.wishes])
        for process, decision in zip(self.processes, decisions, strict=True):
            for shard, part in zip(process.shards, decision.shards, strict=True):
                shard.launch(part, num_right)
            process.in_flight.append((decision, agreed))
