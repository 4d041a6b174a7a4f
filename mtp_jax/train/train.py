"""The training loop: batches in, state forward, log and snapshots out. Stops and resumes at any step, bit for bit."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float
from tqdm import tqdm

from mtp_jax.core.errors import ConfigError
from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.train.data import Batches
from mtp_jax.train.loss import Objective
from mtp_jax.train.run_log import RunLog, check_board
from mtp_jax.train.snapshots import Snapshots
from mtp_jax.train.state import Optimiser, TrainState, init_state, make_train_step

Evaluate = Callable[[Weights], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run. `window` is in positions; a batch row holds two tokens more (see `mtp_jax.train.loss`).

    `mode`: "joint" trains target and MTP layers, "heads" the MTP layers on a frozen target. The learning rate rises
    linearly over `warmup_steps`, then follows a cosine from `peak_rate` to `end_rate`. `log_every`, `save_every` and
    `evaluate_every` are in steps; 0 turns the last two off (the final state is saved all the same). `data_parallel`
    devices share each batch.
    """

    mode: str
    steps: int
    batch_size: int
    window: int
    peak_rate: float
    end_rate: float = 0.0
    warmup_steps: int = 0
    objective: Objective = field(default_factory=Objective)
    optimiser: Optimiser = field(default_factory=Optimiser)
    compute_dtype: str = "bfloat16"
    seed: int = 0
    log_every: int = 50
    save_every: int = 0
    evaluate_every: int = 0
    keep: int = 2
    data_parallel: int = 1

    def __post_init__(self) -> None:
        at_least_one = ("steps", "batch_size", "log_every", "keep", "data_parallel")
        for name, low in (*((name, 1) for name in at_least_one), ("window", 2), ("seed", 0)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {low}.")
        if not 0 <= self.warmup_steps <= self.steps:
            raise ConfigError(f"warmup_steps is {self.warmup_steps}; it must be from 0 to steps={self.steps}.")
        if not 0 < self.peak_rate < math.inf:
            raise ConfigError(f"peak_rate is {self.peak_rate}; it must be a number above 0.")
        if self.batch_size % self.data_parallel:
            raise ConfigError(f"batch_size is {self.batch_size}; data_parallel={self.data_parallel} must divide it.")

    def rate_at(self, step: int) -> float:
        """The learning rate of `step` (0-based).

        >>> config = TrainConfig(mode="joint", steps=10, batch_size=1, window=8, peak_rate=1.0, warmup_steps=2)
        >>> [round(config.rate_at(step), 3) for step in (0, 1, 2, 6, 9)]
        [0.5, 1.0, 1.0, 0.5, 0.038]
        """
        if step < self.warmup_steps:
            return self.peak_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.end_rate + (self.peak_rate - self.end_rate) * (1 + math.cos(math.pi * progress)) / 2


@runtime_checkable
class Lessons(Protocol):
    """Batches, and the step that learns from one."""

    def at(self, step: int) -> np.ndarray:
        """Batch `step` (0-based): a function of the step alone. Its first dimension is split over devices."""
        ...

    def step(
        self, state: TrainState, batch: Array, learning_rate: Float[Array, ""]
    ) -> tuple[TrainState, dict[str, Array]]:
        """The next state, and what is logged; `state` is donated."""
        ...

    @property
    def counted_per_batch(self) -> int:
        """Positions of a batch that the loss is of."""
        ...


class WindowLessons:
    """Windows of one long row of tokens. Satisfies `Lessons`."""

    def __init__(self, family: ModelFamily, config: TrainConfig, tokens: np.ndarray):
        self._batches = Batches(tokens, config.window + 2, config.batch_size, config.seed)
        self.counted_per_batch = config.batch_size * config.window
        self.step = make_train_step(
            family,
            mode=config.mode,
            objective=config.objective,
            optimiser=config.optimiser,
            compute_dtype=config.compute_dtype,
        )

    def at(self, step: int) -> np.ndarray:
        """Tokens [batch_size, window + 2]."""
        return self._batches.at(step)


class Trainer:
    """Runs one `TrainConfig`. `folder` receives `log.jsonl` and the snapshots; a folder with snapshots is continued.

    `data`: one row of packed tokens, or lessons of another kind. `tensorboard`: a folder for TensorBoard's events. Two
    trainers with the same arguments end in the same bits, whether one of them was stopped and resumed or not, on the
    same devices and library versions.
    """

    def __init__(
        self,
        family: ModelFamily,
        config: TrainConfig,
        data: np.ndarray | Lessons,
        folder: Path,
        *,
        tensorboard: Path | None = None,
    ):
        check_board(tensorboard)
        num_layers, depths = family.num_mtp_layers, config.objective.depths
        if num_layers == 0:
            raise ConfigError("the model has no MTP layer; training needs at least one.")
        if num_layers > 1 and depths > num_layers:
            raise ConfigError(f"depths is {depths}; the model has {num_layers} MTP layers, one for each depth.")
        self.family, self.config, self.folder, self._tensorboard = family, config, folder, tensorboard
        self.lessons = WindowLessons(family, config, data) if isinstance(data, np.ndarray) else data
        devices = jax.local_devices()
        if config.data_parallel > len(devices):
            raise ConfigError(f"data_parallel is {config.data_parallel}; this process has {len(devices)} devices.")
        mesh = jax.make_mesh(
            (config.data_parallel,), ("data",), axis_types=(AxisType.Auto,), devices=devices[: config.data_parallel]
        )
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._by_row = NamedSharding(mesh, PartitionSpec("data"))

    def advance(self, state: TrainState, step: int) -> tuple[TrainState, dict[str, jax.Array]]:
        """Launches step `step` on `state`, which is donated; the results are not waited for."""
        batch = jax.device_put(self.lessons.at(step), self._by_row)
        rate = jax.device_put(np.float32(self.config.rate_at(step)), self._replicated)
        return self.lessons.step(state, batch, rate)

    def fresh(self, weights: Weights) -> TrainState:
        """A state at step 0 around a copy of `weights`."""
        return jax.device_put(init_state(weights, self.config.mode, self.config.optimiser), self._replicated)

    def seconds_per_step(self, weights: Weights, steps: int = 5) -> float:
        """Measured on a throwaway state, compilation left out (the program stays compiled for `run`)."""
        state, _ = self.advance(self.fresh(weights), 0)
        jax.block_until_ready(state)
        begin = time.perf_counter()
        for step in range(steps):
            state, _ = self.advance(state, step)
        jax.block_until_ready(state)
        return (time.perf_counter() - begin) / steps

    def run(
        self, weights: Weights, *, evaluate: Evaluate | None = None, stop_after: int | None = None
    ) -> tuple[Weights, int]:
        """Trains from `weights`, or from the newest snapshot in the folder; returns float32 weights and the last step.

        `evaluate` gets the weights every `evaluate_every` steps and at the end; what it returns goes into the log.
        `stop_after` ends the run early after that step, as a kill would, with a snapshot to go on from.
        """
        config = self.config
        last = min(config.steps, stop_after or config.steps)
        self.folder.mkdir(parents=True, exist_ok=True)
        with (
            Snapshots(self.folder, keep=config.keep) as snapshots,
            RunLog(self.folder, self._tensorboard) as log,
        ):
            state, first = self.fresh(weights), snapshots.latest_step()
            if first:
                state = snapshots.restore(first, state)
            began, logged = time.perf_counter(), first
            for step in tqdm(range(first, last), initial=first, total=config.steps, desc=config.mode, disable=None):
                state, metrics = self.advance(state, step)
                done = step + 1
                if done % config.log_every == 0 or done == last:
                    record = _plain(jax.device_get(metrics))
                    seconds = time.perf_counter() - began
                    speed = (done - logged) * self.lessons.counted_per_batch / seconds
                    record |= {"step": done, "rate": config.rate_at(step), "tokens_per_second": round(speed)}
                    log.write(record)
                    began, logged = time.perf_counter(), done
                if (
                    evaluate is not None
                    and config.evaluate_every
                    and (done % config.evaluate_every == 0 or done == config.steps)
                ):
                    log.write({"step": done, "evaluation": evaluate(state.weights)})
                if done == last or (config.save_every and done % config.save_every == 0):
                    snapshots.save(done, state)
        return state.weights, max(first, last)


def train(
    family: ModelFamily,
    config: TrainConfig,
    tokens: np.ndarray,
    weights: Weights,
    folder: Path,
    *,
    evaluate: Evaluate | None = None,
) -> Weights:
    """Trains `weights` (or continues in `folder`) to the end of `config`; returns float32 weights.

    `tokens` is one row of packed tokens (`mtp_jax.train.data.read_tokens`).
    """
    trained, _ = Trainer(family, config, tokens, folder).run(weights, evaluate=evaluate)
    return trained


def _plain(metrics: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {name: np.asarray(value, np.float64).round(5).tolist() for name, value in metrics.items()}
