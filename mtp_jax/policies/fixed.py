"""Always the same draft length."""

from dataclasses import dataclass

from mtp_jax.policies.api import PolicyView, StepStats


@dataclass(frozen=True)
class FixedDraftLen:
    """Kmax in every step."""

    @property
    def is_voted(self) -> bool:
        return False

    def choose(self, view: PolicyView) -> int:
        return view.max_draft_len

    def update(self, stats: StepStats) -> "FixedDraftLen":  # noqa: ARG002
        return self
