"""Turns drafting off where drafts are mostly refused, and on again when they are not: around any other policy.

What counts is the share of first drafts that were kept, over the last `window` of them. The first draft is made
whenever any is, and how often it is right does not depend on how many follow it; a share of all drafts would fall with
every longer draft length that the policy inside tries, and one threshold could not serve them all.
"""

from dataclasses import dataclass, replace

from mtp_jax.policies.api import DraftLenPolicy, PolicyView, StepStats


@dataclass(frozen=True)
class AcceptanceGate:
    """Chooses as `inner` does while the gate is open, and 0 while it is closed.

    It closes when `window` first drafts are known and less than `disable_below` of them were kept. While it is closed,
    one step in `probe_every` makes one draft a slot (unless `inner` would make none), by the group's step number, so
    that shards probe together; it opens when the window's share is `disable_below` again. None: closed for good.
    Each shard's gate has its own drafts to go by, so what it says is voted on, and so is `inner`'s choice, unless it
    follows from the batch alone: then it is asked about the group's.

    >>> from mtp_jax.policies.fixed import FixedDraftLen
    >>> gate = AcceptanceGate(FixedDraftLen(), disable_below=0.5, window=2)
    >>> gate = gate.update(StepStats(8, 3, (2, 2, 2), (0, 0, 0)))
    >>> [gate.choose(PolicyView(2, 8, 3, step)) for step in (62, 63, 64)]
    [0, 1, 0]
    """

    inner: DraftLenPolicy
    disable_below: float
    window: int = 256
    probe_every: int | None = 64
    is_open: bool = True
    outcomes: tuple[tuple[int, int], ...] = ()  # (made, kept) first drafts by step, oldest first: `window` or just more

    @property
    def is_voted(self) -> bool:
        return True

    def choose(self, view: PolicyView) -> int:
        return min(self.most(view), self.inner.choose(view))

    def most(self, view: PolicyView) -> int:
        """The longest draft that the gate lets through."""
        if self.is_open:
            return view.max_draft_len
        is_probe = self.probe_every is not None and view.step_number % self.probe_every == self.probe_every - 1
        return min(1, view.max_draft_len) if is_probe else 0

    def update(self, stats: StepStats) -> "AcceptanceGate":
        updated = replace(self, inner=self.inner.update(stats))
        if not stats.drafted:
            return updated
        return updated._with_outcome(stats.drafted[0], stats.accepted[0])

    def _with_outcome(self, num_made: int, num_kept: int) -> "AcceptanceGate":
        outcomes = (*self.outcomes, (num_made, num_kept))
        made = sum(outcome[0] for outcome in outcomes)
        while made - outcomes[0][0] >= self.window:  # without the oldest step there are still enough
            made -= outcomes[0][0]
            outcomes = outcomes[1:]
        is_good = sum(outcome[1] for outcome in outcomes) >= self.disable_below * made
        is_open = is_good or made < self.window if self.is_open else is_good and self.probe_every is not None
        return replace(self, outcomes=outcomes, is_open=is_open)
