"""What a draft-length policy must provide. Host arithmetic only: no jax, no arrays, no token of the step it decides."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from mtp_jax.core.errors import InvariantError


@dataclass(frozen=True)
class PolicyView:
    """What a policy may look at: counts that the host knows before the launch."""

    num_decoding: int  # slots that decode in this step, in the data shard with most of them; prefills are not counted
    slot_bucket: int  # slots of the compiled program that would run
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


def wanted_draft_len(policy: DraftLenPolicy, view: PolicyView) -> int:
    """The policy's choice. `InvariantError` if it is outside 0..view.max_draft_len."""
    wanted = policy.choose(view)
    if not 0 <= wanted <= view.max_draft_len:
        raise InvariantError(f"the policy chose draft length {wanted}, outside 0..{view.max_draft_len}")
    return wanted
