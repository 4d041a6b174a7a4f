"""What a draft-length policy must provide. Host arithmetic only: no jax, no arrays, no token of the step it decides."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class PolicyView:
    """What a policy may look at: counts that the host knows before the launch."""

    num_decoding: int  # slots that decode in this step; prefills are not counted
    slot_bucket: int  # slots of the compiled program that would run
    max_draft_len: int
    step_number: int  # launches of decode steps so far


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

    def choose(self, view: PolicyView) -> int:
        """The draft length wanted, 0..view.max_draft_len."""
        ...

    def update(self, stats: StepStats) -> "DraftLenPolicy":
        """The policy after one more finished step."""
        ...
