"""What a draft-length policy must provide. Host arithmetic only: no jax, no arrays, no token of the step it decides."""

from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

from mtp_jax.core.errors import InvariantError


@dataclass(frozen=True)
class PolicyView:
    """What a policy may look at: counts that the host knows before the launch."""

    num_decoding: int  # slots that decode in this step, in the data shard with most of them; prefills are not counted
    slot_bucket: int  # slots of the compiled program that would run, by the step before it where other shards have more
    max_draft_len: int
    step_number: int  # decode steps of the group so far: the same on every process


@dataclass(frozen=True)
class StepStats:
    """What one finished decode step taught, read late."""

    slot_bucket: int
    draft_len: int
    drafted: tuple[int, ...]  # by position: slots whose cap reached it
    accepted: tuple[int, ...]  # by position: slots whose accepted prefix reached it
    elapsed_s: float | None = None  # step time, where it could be told apart; None else


@runtime_checkable
class DraftLenPolicy(Protocol):
    """Chooses K. Implementations are immutable: `update` returns a new policy."""

    @property
    def is_voted(self) -> bool:
        """Whether the choice depends on more than the view, so that shards may differ and must vote on it."""
        ...

    def choose(self, view: PolicyView) -> int:
        """The draft length wanted, 0..view.max_draft_len."""
        ...

    def update(self, stats: StepStats) -> "DraftLenPolicy":
        """The policy after one more finished step."""
        ...


class Around(Protocol):
    """A policy that bounds what another one chooses, by what it learnt itself."""

    @property
    def inner(self) -> DraftLenPolicy:
        """The other one."""
        ...

    def most(self, view: PolicyView) -> int:
        """The longest draft it allows; its choice is the smaller of this and what `inner` chooses."""
        ...


def wish(policy: DraftLenPolicy, view: PolicyView) -> int:
    """The part of the choice that is voted on: what a shard learnt, and other shards may not have.

    >>> from mtp_jax.policies.schedule import ScheduledDraftLen
    >>> policy, view = ScheduledDraftLen(((4, 3), (8, 1))), PolicyView(8, 8, 3, 0)
    >>> wish(policy, view), by_view(policy, view)
    (3, 1)
    """
    if _is_around(policy):
        return min(policy.most(view), wish(policy.inner, view))
    return wanted_draft_len(policy, view) if policy.is_voted else view.max_draft_len


def by_view(policy: DraftLenPolicy, view: PolicyView) -> int:
    """The part that follows from the view alone. Asked about the group's view it is the same on every process.

    A shard must not wish for it: of a schedule that is not monotone, the smallest of the shards' choices, each by its
    own batch, need not be the choice by the largest batch.
    """
    if _is_around(policy):
        return by_view(policy.inner, view)
    return view.max_draft_len if policy.is_voted else wanted_draft_len(policy, view)


def _is_around(policy: object) -> TypeGuard[Around]:
    return hasattr(policy, "most")


def wanted_draft_len(policy: DraftLenPolicy, view: PolicyView) -> int:
    """The policy's choice. `InvariantError` if it is outside 0..view.max_draft_len."""
    wanted = policy.choose(view)
    if not 0 <= wanted <= view.max_draft_len:
        raise InvariantError(f"the policy chose draft length {wanted}, outside 0..{view.max_draft_len}")
    return wanted
