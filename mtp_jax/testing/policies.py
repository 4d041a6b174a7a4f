"""A draft-length policy that says what it is told: the test's schedule, step by step."""

from dataclasses import dataclass

from mtp_jax.policies.api import PolicyView, StepStats


@dataclass(frozen=True)
class ScriptedDraftLen:
    """`wishes[i]` in decode step i, cut to the engine's Kmax; past the end the last one goes on.

    >>> policy = ScriptedDraftLen((3, 0))
    >>> [policy.choose(PolicyView(1, 1, 2, step)) for step in range(3)]
    [2, 0, 0]
    """

    wishes: tuple[int, ...]

    @property
    def is_voted(self) -> bool:
        return True

    def choose(self, view: PolicyView) -> int:
        wish = self.wishes[min(view.step_number, len(self.wishes) - 1)]
        return min(wish, view.max_draft_len)

    def update(self, stats: StepStats) -> "ScriptedDraftLen":  # noqa: ARG002
        return self
