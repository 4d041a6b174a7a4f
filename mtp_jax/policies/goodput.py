"""Draft length by what it earns: expected tokens per second, from step costs and observed acceptance.

With conditional acceptance a_j at draft position j, a step with K drafts emits 1 + a_1 + a_1 a_2 + ... tokens of a slot
(accepted prefix plus the bonus token), so its goodput is that sum over the cost of the (slots, K) program. Acceptance
is smoothed by an exponential window and starts from an optimistic prior, so that drafting is tried first; a position
that no step ever reached is taken to be as good as the last one that was. A new length must beat the current one by
`hysteresis`.

Every `probe_every` steps of the group one step drafts further than would earn most, so that positions nobody drafted
lately are measured again: the length that would earn most if all of them were accepted. If even that would not beat the
length in use, there is nothing to learn and no probe is made.

A step's cost is what it took at warm-up times a ratio learnt in use: the smoothed time of that shape over its warm-up
cost; where the shape did not run lately, that of the last shape with as many slots, or of all together. Such a borrowed
ratio may be wrong, and a length that looks dear by it would never run and never be known better: so the length is
chosen as if the shape were by `doubt` cheaper, but not cheaper than at warm-up, where no host was in the way.

A time above 3 times the present estimate is left out, and so is one below a third of it: a host that was stopped, or a
reader that paused, makes one step seem long and the next one short. What goes on for `patience` steps is no pause, and
is believed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtp_jax.core.errors import InvariantError
from mtp_jax.policies.api import PolicyView, StepStats

_ShapeKey = tuple[int, int]
_IMPLAUSIBLE = 3.0


@dataclass(frozen=True)
class Drift:
    """How one shape's time in use compares with its warm-up cost."""

    ratio: float
    last_update: int  # number of the update that it comes from
    num_seen: int = 1


@dataclass(frozen=True)
class Goodput:
    """`cost_s[(slots, K)]` is a step's time at warm-up; `rates` the smoothed conditional acceptance by position."""

    cost_s: Mapping[_ShapeKey, float]
    rates: tuple[float, ...]
    hysteresis: float = 0.02
    probe_every: int = 64
    memory: float = 0.95  # weight of the past per observed slot-step
    cost_memory: float = 0.9  # weight of the past per observed step time; of the first few the mean is taken
    lately: int = 256  # updates after which a shape's own ratio no longer counts
    doubt: float = 0.1  # by how much a shape that did not run lately may be cheaper than the others let it seem
    patience: int = 8  # times in a row that are left out, at most
    current: Mapping[int, int] = field(default_factory=dict[int, int])  # slot bucket -> length in use
    drifts: Mapping[_ShapeKey, Drift] = field(default_factory=dict[_ShapeKey, Drift])
    overall: Drift = Drift(1.0, 0, num_seen=0)  # of all shapes together
    num_updates: int = 0
    num_observed: int = 0  # draft positions that were ever reached
    num_left_out: int = 0  # the last so many times
    decided_for: tuple[int, int] | None = None  # slot bucket and Kmax whose best length `current` has, as of now

    @property
    def is_voted(self) -> bool:
        return True

    def choose(self, view: PolicyView) -> int:
        asked_for = (view.slot_bucket, view.max_draft_len)
        best = self.current[view.slot_bucket] if asked_for == self.decided_for else self.best_len(*asked_for)
        is_probe = view.step_number % self.probe_every == self.probe_every - 1
        return self._probe_len(view.slot_bucket, best, view.max_draft_len) if is_probe else best

    def best_len(self, slot_bucket: int, max_draft_len: int) -> int:
        """The length with the highest goodput; the one in use unless another beats it by `hysteresis`."""
        earned = self._earned(slot_bucket, self.rates[:max_draft_len])
        best = max(range(len(earned)), key=earned.__getitem__)
        in_use = self.current.get(slot_bucket, best)
        if in_use > max_draft_len:
            return best
        return best if earned[best] > (1 + self.hysteresis) * earned[in_use] else in_use

    def _probe_len(self, slot_bucket: int, best: int, max_draft_len: int) -> int:
        """The length that earns most if all drafts beyond `best` are accepted; `best` where even that is no gain."""
        hopeful = self._earned(slot_bucket, self.rates[:best] + (1.0,) * (max_draft_len - best))
        longer = max(range(best, len(hopeful)), key=hopeful.__getitem__)
        return longer if hopeful[longer] > (1 + self.hysteresis) * hopeful[best] else best

    def goodput(self, slot_bucket: int, draft_len: int) -> float:
        """Expected tokens per slot and second of a step with `draft_len` drafts, with the benefit of the doubt."""
        return self._earned(slot_bucket, self.rates[:draft_len])[draft_len]

    def _earned(self, slot_bucket: int, rates: Sequence[float]) -> list[float]:
        """Goodput by draft length, 0 to `len(rates)`, if drafts are accepted at these rates."""
        expected, reach, earned = 1.0, 1.0, list[float]()
        for draft_len, cost in enumerate(self._hoped_costs(slot_bucket, len(rates))):
            if draft_len > 0:
                reach *= rates[draft_len - 1]
                expected += reach
            earned.append(expected / cost)
        return earned

    def _hoped_costs(self, slot_bucket: int, max_draft_len: int) -> list[float]:
        """Costs by draft length; of shapes that did not run lately by `doubt` less, but no less than at warm-up."""
        costs, borrowed = list[float](), None
        for draft_len in range(max_draft_len + 1):
            at_warm_up = self._at_warm_up(slot_bucket, draft_len)
            own = self._fresh_drift(slot_bucket, draft_len)
            if own is not None:
                costs.append(at_warm_up * own.ratio)
                continue
            borrowed = borrowed or self._borrowed_drift(slot_bucket).ratio
            costs.append(at_warm_up * max((1 - self.doubt) * borrowed, min(borrowed, 1.0)))
        return costs

    def cost(self, slot_bucket: int, draft_len: int) -> float:
        """Seconds of a step, by warm-up and use. `InvariantError` for a shape that was not measured at warm-up.

        >>> policy = Goodput({(1, 0): 0.5}, (), cost_memory=0.0).update(StepStats(1, 0, (), (), elapsed_s=0.75))
        >>> policy.cost(1, 0)
        0.75
        """
        drift = self._fresh_drift(slot_bucket, draft_len) or self._borrowed_drift(slot_bucket)
        return self._at_warm_up(slot_bucket, draft_len) * drift.ratio

    def _at_warm_up(self, slot_bucket: int, draft_len: int) -> float:
        cost = self.cost_s.get((slot_bucket, draft_len))
        if cost is None:
            raise InvariantError(f"no step cost was measured for {slot_bucket} slots and draft length {draft_len}")
        return cost

    def _borrowed_drift(self, slot_bucket: int) -> Drift:
        """For a shape that did not run lately: that of the last one with as many slots, else of all."""
        others = [self._fresh_drift(*shape) for shape in self.drifts if shape[0] == slot_bucket]
        return max((drift for drift in others if drift), key=lambda drift: drift.last_update, default=self.overall)

    def _fresh_drift(self, slot_bucket: int, draft_len: int) -> Drift | None:
        drift = self.drifts.get((slot_bucket, draft_len))
        return drift if drift is not None and self.num_updates - drift.last_update < self.lately else None

    def update(self, stats: StepStats) -> "Goodput":
        rates, num_observed = self._rates_after(stats)
        updated = self._with(rates=rates, num_observed=num_observed, num_updates=self.num_updates + 1)
        if stats.elapsed_s is not None:
            updated = updated._with_time(stats.slot_bucket, stats.draft_len, stats.elapsed_s)
        decided_for = (stats.slot_bucket, len(rates))
        in_use = updated.best_len(*decided_for)
        if in_use == self.current.get(stats.slot_bucket):
            return updated if decided_for == self.decided_for else updated._with(decided_for=decided_for)
        return updated._with(current={**self.current, stats.slot_bucket: in_use}, decided_for=decided_for)

    def _with(self, **changes: Any) -> "Goodput":
        """As `dataclasses.replace`, at a fifth of its time: this runs once a step, and a small step waits for it."""
        changed = object.__new__(Goodput)
        changed.__dict__.update(self.__dict__, **changes)
        return changed

    def _rates_after(self, stats: StepStats) -> tuple[tuple[float, ...], int]:
        rates, num_observed = list(self.rates), self.num_observed
        reached = stats.drafted[0] if stats.drafted else 0
        for position, accepted in enumerate(stats.accepted):
            trials = min(reached, stats.drafted[position])
            if trials > 0:
                keep = self.memory**trials
                rates[position] = keep * rates[position] + (1 - keep) * min(accepted / trials, 1.0)
                num_observed = max(num_observed, position + 1)
            reached = accepted
        if num_observed > 0:
            rates[num_observed:] = [rates[num_observed - 1]] * (len(rates) - num_observed)
        return tuple(rates), num_observed

    def _with_time(self, slot_bucket: int, draft_len: int, elapsed_s: float) -> "Goodput":
        estimate = self.cost(slot_bucket, draft_len)
        is_plausible = estimate / _IMPLAUSIBLE <= elapsed_s <= estimate * _IMPLAUSIBLE
        if not is_plausible and self.num_left_out < self.patience:
            return self._with(num_left_out=self.num_left_out + 1)
        observed = elapsed_s / self.cost_s[slot_bucket, draft_len]
        drift = self._fresh_drift(slot_bucket, draft_len) or Drift(1.0, 0, num_seen=0)
        return self._with(
            drifts={**self.drifts, (slot_bucket, draft_len): self._moved(drift, observed)},
            overall=self._moved(self.overall, observed),
            num_left_out=0 if is_plausible else self.num_left_out,
        )

    def _moved(self, drift: Drift, observed: float) -> Drift:
        """Exponentially smoothed, but the plain mean at first: started at 1, a shape seen rarely would look cheap."""
        keep = min(self.cost_memory, drift.num_seen / (drift.num_seen + 1))
        return Drift(keep * drift.ratio + (1 - keep) * observed, self.num_updates, drift.num_seen + 1)
