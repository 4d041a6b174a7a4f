"""Draft length by what it earns: expected tokens per second, from measured step costs and observed acceptance.

With conditional acceptance a_j at draft position j, a step with K drafts emits 1 + a_1 + a_1 a_2 + ... tokens of a slot
(accepted prefix plus the bonus token), so its goodput is that sum over the measured cost of the (slots, K) program.
Acceptance is smoothed by an exponential window and starts from an optimistic prior, so that drafting is tried first.
A new length must beat the current one by `hysteresis`; after `probe_every` steps at a shorter length one step is run at
Kmax, so that positions nobody drafted lately are measured again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mtp_jax.core.errors import InvariantError
from mtp_jax.policies.api import PolicyView, StepStats


@dataclass(frozen=True)
class Goodput:
    """`cost_s[(slots, K)]` is the measured time of a step; `rates` the smoothed conditional acceptance by position."""

    cost_s: Mapping[tuple[int, int], float]
    rates: tuple[float, ...]
    hysteresis: float = 0.02
    probe_every: int = 64
    memory: float = 0.95  # weight of the past per observed slot-step
    current: Mapping[int, int] = field(default_factory=dict[int, int])  # slot bucket -> length in use

    @property
    def is_voted(self) -> bool:
        return True

    def choose(self, view: PolicyView) -> int:
        best = self.best_len(view.slot_bucket, view.max_draft_len)
        is_probe = best < view.max_draft_len and view.step_number % self.probe_every == self.probe_every - 1
        return view.max_draft_len if is_probe else best

    def best_len(self, slot_bucket: int, max_draft_len: int) -> int:
        """The length with the highest goodput; the one in use unless another beats it by `hysteresis`."""
        lengths = range(max_draft_len + 1)
        best = max(lengths, key=lambda k: self.goodput(slot_bucket, k))
        in_use = self.current.get(slot_bucket, best)
        if in_use > max_draft_len:
            return best
        gain = self.goodput(slot_bucket, best) / self.goodput(slot_bucket, in_use)
        return best if gain > 1 + self.hysteresis else in_use

    def goodput(self, slot_bucket: int, draft_len: int) -> float:
        """Expected tokens per slot and second of a step with `draft_len` drafts."""
        cost = self.cost_s.get((slot_bucket, draft_len))
        if cost is None:
            raise InvariantError(f"no step cost was measured for {slot_bucket} slots and draft length {draft_len}")
        expected, reach = 1.0, 1.0
        for rate in self.rates[:draft_len]:
            reach *= rate
            expected += reach
        return expected / cost

    def update(self, stats: StepStats) -> "Goodput":
        rates = list(self.rates)
        reached = stats.drafted[0] if stats.drafted else 0
        for position, accepted in enumerate(stats.accepted):
            trials = min(reached, stats.drafted[position])
            if trials > 0:
                keep = self.memory**trials
                rates[position] = keep * rates[position] + (1 - keep) * min(accepted / trials, 1.0)
            reached = accepted
        updated = replace(self, rates=tuple(rates))
        in_use = updated.best_len(stats.slot_bucket, len(rates))
        return replace(updated, current={**self.current, stats.slot_bucket: in_use})
