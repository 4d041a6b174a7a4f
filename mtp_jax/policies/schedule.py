"""Draft length by batch size: many slots share a step's weights already, few do not."""

from dataclasses import dataclass

from mtp_jax.policies.api import PolicyView, StepStats


@dataclass(frozen=True)
class ScheduledDraftLen:
    """`entries` are (inclusive upper bound of the batch size, draft length), ascending; beyond the last one K is 0.

    >>> policy = ScheduledDraftLen(((4, 3), (8, 1)))
    >>> [policy.choose(PolicyView(n, 8, 3, 0)) for n in (1, 4, 5, 8, 9)]
    [3, 3, 1, 1, 0]
    """

    entries: tuple[tuple[int, int], ...]

    @property
    def is_voted(self) -> bool:
        return False

    def choose(self, view: PolicyView) -> int:
        for largest, draft_len in self.entries:
            if view.num_decoding <= largest:
                return draft_len
        return 0

    def update(self, stats: StepStats) -> "ScheduledDraftLen":  # noqa: ARG002
        return self


NO_DRAFTS = ScheduledDraftLen(((1, 0),))
"""Zero at every batch size."""
