"""What the policy is told after each decode step, kept, and the acceptance rates that follow from it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from mtp_jax.engine.scheduler import Scheduler
from mtp_jax.policies.api import DraftLenPolicy, PolicyView, StepStats


@dataclass(frozen=True)
class Recorded:
    """A policy that decides as `inner` does and keeps the record of every finished decode step in `steps`."""

    inner: DraftLenPolicy
    steps: list[StepStats] = field(default_factory=list)

    @property
    def is_voted(self) -> bool:
        return self.inner.is_voted

    def choose(self, view: PolicyView) -> int:
        return self.inner.choose(view)

    def most(self, view: PolicyView) -> int:
        return view.max_draft_len

    def update(self, stats: StepStats) -> "Recorded":
        self.steps.append(stats)
        return replace(self, inner=self.inner.update(stats))


@contextmanager
def recorded(shards: Sequence[Scheduler]) -> Iterator[list[StepStats]]:
    """The decode steps of these data shards while the block runs; their policies go on with what they learn."""
    steps: list[StepStats] = []
    for shard in shards:
        shard.policy = Recorded(shard.policy, steps)
    try:
        yield steps
    finally:
        for shard in shards:
            if isinstance(shard.policy, Recorded):  # as `update` made it, or as it was put there
                shard.policy = shard.policy.inner


@dataclass(frozen=True)
class Acceptance:
    """Acceptance by draft position over a number of decode steps.

    `drafted[j]` slots drafted position j, `accepted[j]` of them kept it, and `reached[j]` of them had kept every
    position before it. `draft_lens` counts steps by their draft length.

    >>> acceptance = Acceptance.of([StepStats(1, 2, (1, 1), (1, 0)), StepStats(1, 2, (1, 1), (0, 0))])
    >>> acceptance.unconditional, acceptance.conditional, acceptance.draft_lens
    ((0.5, 0.0), (0.5, 0.0), {2: 2})
    """

    drafted: tuple[int, ...]
    reached: tuple[int, ...]
    accepted: tuple[int, ...]
    draft_lens: dict[int, int]

    @classmethod
    def of(cls, steps: Iterable[StepStats]) -> "Acceptance":
        """Sums over the steps. A step with several slots counts `min(kept before, drafted here)` as having reached."""
        drafted: list[int] = []
        reached: list[int] = []
        accepted: list[int] = []
        draft_lens: Counter[int] = Counter()
        for step in steps:
            draft_lens[step.draft_len] += 1
            for counts in (drafted, reached, accepted):
                counts.extend([0] * (len(step.drafted) - len(counts)))
            still_whole = step.drafted[0] if step.drafted else 0
            for position, (num_drafted, num_accepted) in enumerate(zip(step.drafted, step.accepted, strict=True)):
                drafted[position] += num_drafted
                reached[position] += min(still_whole, num_drafted)
                accepted[position] += num_accepted
                still_whole = num_accepted
        return cls(tuple(drafted), tuple(reached), tuple(accepted), dict(sorted(draft_lens.items())))

    @property
    def unconditional(self) -> tuple[float, ...]:
        """Of the drafts made at each position, the share that was kept; 0 where none was made."""
        return _shares(self.accepted, self.drafted)

    @property
    def conditional(self) -> tuple[float, ...]:
        """The same, of the drafts whose predecessors were all kept: how good the drafter is at that position."""
        return _shares(self.accepted, self.reached)


def _shares(parts: Sequence[int], wholes: Sequence[int]) -> tuple[float, ...]:
    return tuple(part / whole if whole else 0.0 for part, whole in zip(parts, wholes, strict=True))
