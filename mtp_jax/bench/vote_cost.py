"""What the vote adds to a step, measured so that a percent of the step can be told from none.

The same step runs with the vote, without it, and with many votes, in turns: each time as a chain of launches that
nobody waits for in between, as in the engine's loop. What is compared are chains of one round, which the machine's
drift meets alike; every other round goes backwards. Two figures follow, each a median over rounds with its interval:

- `added_us`: the step with the vote less the step without it. It is what a user pays, and scatters as steps do.
- `one_vote_us`: the step with many votes less the step with one, over the number of votes more. The votes of such a
  step wait for each other, so it is what a vote would take if nothing else of the step ran meanwhile; the scatter of a
  step counts for that much less.
"""

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax
from jaxtyping import Array, Int

from mtp_jax.bench.intervals import Interval, median_interval
from mtp_jax.core.shapes import StepShape
from mtp_jax.engine.batch import BatchBuilder
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.launch import Launcher
from mtp_jax.ops.sharding import Parallel
from mtp_jax.step.program import StepProgram

MANY = 32
_CHAIN = 20


@dataclass(frozen=True)
class VotingOften(Parallel):
    """Takes the vote `times` times over, each on the result of the one before; what is agreed stays the same."""

    times: int = MANY

    def largest(self, votes_V: Int[Array, " V"]) -> Int[Array, " V"]:
        agreed_V = super().largest(votes_V)
        for _ in range(self.times - 1):
            # Alike on all devices, the maximum would be left out; device 0 hands in what was agreed, the others less.
            agreed_V = super().largest(agreed_V - lax.axis_index(self.mesh_axes))
        return agreed_V


@dataclass(frozen=True)
class VoteCost:
    """Microseconds of one step and what the vote is of it, over `num_rounds` rounds of `chain` steps each way."""

    shape: StepShape
    without_us: float
    added_us: Interval
    one_vote_us: Interval
    num_rounds: int
    chain: int

    @property
    def share(self) -> Interval:
        """What the vote adds, as a part of the step without it."""
        return self.added_us.over(self.without_us)

    @property
    def one_vote_share(self) -> Interval:
        """What one vote takes by itself, as a part of the step without it."""
        return self.one_vote_us.over(self.without_us)

    def as_text(self) -> str:
        """One line for people."""
        return (
            f"{self.shape.slots} slots a shard, K={self.shape.draft_len}: a step of {self.without_us:.1f} us; the vote "
            f"adds {_us(self.added_us)} ({_percent(self.share)}), one of {MANY} in a row takes "
            f"{_us(self.one_vote_us)} ({_percent(self.one_vote_share)})"
        )


def full_shapes(engine: Engine) -> tuple[StepShape, ...]:
    """The longest and the shortest step of a full batch."""
    slots, longest = engine.grid.slot_buckets[-1], engine.grid.max_draft_len
    return tuple(dict.fromkeys((StepShape(slots, longest), StepShape(slots, 0))))


def vote_costs(
    engine: Engine, dtype: Any, shapes: Sequence[StepShape], *, num_rounds: int, chain: int = _CHAIN
) -> Iterator[VoteCost]:
    """Of these shapes, all slots live, each as soon as it is known.

    `num_rounds` at least `intervals.FEWEST`. Leaves the engine's device state unfit for requests.
    """
    program, parallel = engine.program, engine.program.parallel
    silent = _beside(engine, dataclasses.replace(program, is_voting=False), dtype)
    often = _beside(engine, dataclasses.replace(program, parallel=VotingOften(parallel.data, parallel.model)), dtype)
    for shape in shapes:
        for launcher in (silent, often):
            launcher.warm(shapes=[shape])
        # No slot may come to its end within a chain: a step of finished slots could be another one.
        steps = min(chain, (engine.config.max_model_len - 2) // (shape.draft_len + 1))
        once_us, without_us, often_us = _in_turns((engine.launcher, silent, often), shape, steps, num_rounds)
        yield VoteCost(
            shape=shape,
            without_us=statistics.median(without_us),
            added_us=median_interval(_differences(once_us, without_us)),
            one_vote_us=median_interval([extra / (MANY - 1) for extra in _differences(often_us, once_us)]),
            num_rounds=num_rounds,
            chain=steps,
        )


def _beside(engine: Engine, program: StepProgram, dtype: Any) -> Launcher:
    """Another program over the same weights, with a device state of its own."""
    batch = BatchBuilder(engine.config, engine.placement, is_voting=program.is_voting)
    return Launcher(program, engine.launcher.weights, engine.config, engine.grid, batch, engine.placement, dtype)


def _in_turns(launchers: Sequence[Launcher], shape: StepShape, chain: int, num_rounds: int) -> list[list[float]]:
    """Microseconds of a step by launcher and round, after one round that does not count."""
    times_us: list[list[float]] = [[] for _ in launchers]
    for number in range(num_rounds + 1):
        ways = list(zip(launchers, times_us, strict=True))
        for launcher, found in reversed(ways) if number % 2 else ways:
            found.append(1e6 * launcher.time_chain(shape, chain))
    return [found[1:] for found in times_us]


def _differences(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(left, right, strict=True)]


def _us(interval: Interval) -> str:
    return f"{interval.median:.1f} us [{interval.low:.1f}, {interval.high:.1f}]"


def _percent(interval: Interval) -> str:
    return f"{interval.median:+.2%} [{interval.low:+.2%}, {interval.high:+.2%}]"
