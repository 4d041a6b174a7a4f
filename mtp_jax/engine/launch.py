"""Compiles every shape at start, refuses any other, launches without waiting."""

import functools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.core.config import EngineConfig
from mtp_jax.core.errors import InvariantError
from mtp_jax.core.layout import Column
from mtp_jax.core.shapes import Shape, ShapeGrid, StepShape
from mtp_jax.core.types import DecodeState, PackedOutputs
from mtp_jax.engine.batch import BatchBuilder
from mtp_jax.engine.decisions import LaunchDecision
from mtp_jax.engine.readback import Launch, fastest_in_turns, start_copy, wait_until_done
from mtp_jax.models.api import Weights
from mtp_jax.models.sharding import weight_specs
from mtp_jax.models.shortlist import SHORTLIST, shortlist_specs
from mtp_jax.ops.placement import Placement
from mtp_jax.step.program import StepProgram, init_state, state_specs
from mtp_jax.step.run import make_run

_FEWEST_COMPILE_THREADS = 4
_CHAIN_LENGTH = 6
OnShape = Callable[[Shape], None]
Step = Callable[..., tuple[DecodeState, PackedOutputs]]


class Launcher:
    """Owns the weights, the device state and the compiled steps. The state is donated to every launch."""

    def __init__(
        self,
        program: StepProgram,
        weights: Weights,
        config: EngineConfig,
        grid: ShapeGrid,
        batch: BatchBuilder,
        placement: Placement,
        dtype: jnp.dtype,
    ) -> None:
        self.num_traces = 0
        self.warm_up_s: dict[Shape, float] = {}  # seconds from the start of warm-up until the shape was ready
        self._program = program
        self._config = config
        self._grid = grid
        self._batch = batch
        self._placement = placement
        self._weight_specs = weight_specs(program.family, placement.rules)
        if SHORTLIST in weights:
            self._weight_specs = {**self._weight_specs, **shortlist_specs(program.family, placement.rules)}
        self._state_specs = state_specs(program, config, dtype, placement.rules)
        self.weights = weights if placement.mesh is None else placement.put(weights, self._weight_specs)
        # Committed to its devices from the start, as every later state is: a launch would compile again otherwise.
        self._state: DecodeState = placement.build(lambda: init_state(program, config, dtype), self._state_specs)
        self._steps: dict[Shape, Step] = {}
        self._greedy_steps: dict[Shape, Step] = {}  # where the configuration wants them

    def warm(self, on_shape: OnShape | None = None, *, shapes: Sequence[Shape] | None = None) -> None:
        """Compiles every shape of the grid, or `shapes` of it, several at a time; runs each once with no live slot.

        Compiled programs are called as they are, so a launch can never compile: arguments that do not fit are an error.
        """
        shapes = (*self._grid.all_prefills(), *self._grid.all_steps()) if shapes is None else shapes
        start = time.perf_counter()
        with ThreadPoolExecutor(max_workers=_compile_threads()) as threads:

            def compiling(shape: Shape, *, is_greedy: bool = False) -> Future[Step]:
                return threads.submit(self._lower(shape, self._traced(shape, is_greedy=is_greedy)).compile)

            # Tracing holds the interpreter, compiling does not: the next shape is traced while others compile.
            has_greedy = self._config.greedy_programs
            greedy = {shape: compiling(shape, is_greedy=True) for shape in (shapes if has_greedy else ())}
            for shape, compiled in {shape: compiling(shape) for shape in shapes}.items():
                self._steps[shape] = compiled.result()
                if shape in greedy:
                    self._greedy_steps[shape] = greedy[shape].result()
                self.warm_up_s[shape] = time.perf_counter() - start
                if on_shape is not None:
                    on_shape(shape)
        for shape in shapes:
            for is_greedy in (False, True) if shape in greedy else (False,):
                wait_until_done(self._run(shape, self._idle_inputs(shape), is_greedy=is_greedy))

    def measure_step_costs(self, rounds: int = 6) -> dict[tuple[int, int], float]:
        """Seconds of one step by (slots, draft length), every slot of the bucket live, on the null page.

        Of a chain of steps that nobody waits for in between, as the loop launches them: one step alone would count the
        way to the device and back too, which weighs most on the short steps. To be called after `warm` and before the
        first request: it leaves lengths behind that a prefill overwrites.
        """
        shapes = self._grid.all_steps()
        chains = [functools.partial(self._chain_full, shape, _CHAIN_LENGTH) for shape in shapes]
        fastest = fastest_in_turns(chains, rounds)
        self._reset_slots()
        return {
            (shape.slots, shape.draft_len): seconds / _CHAIN_LENGTH
            for shape, seconds in zip(shapes, fastest, strict=True)
        }

    def time_chain(self, shape: StepShape, num_steps: int) -> float:
        """Seconds of one of `num_steps` steps launched without waiting in between, every slot of the bucket live."""
        return fastest_in_turns([functools.partial(self._chain_full, shape, num_steps)], rounds=1)[0] / num_steps

    def launch(self, decision: LaunchDecision, inputs: jax.Array) -> Launch:
        """Dispatches a step and starts the copy of its outputs to the host; returns at once."""
        outputs = self._run(decision.shape, inputs, is_greedy=decision.needs.is_nothing)
        launch = Launch(decision, outputs)
        start_copy(launch)
        return launch

    def lower(self, shape: Shape, *, is_greedy: bool = False) -> Any:
        """The lowered program of a shape, for memory and collective checks; not one of `num_traces`."""
        return self._lower(shape, self._step(shape, is_greedy=is_greedy))

    def _run(self, shape: Shape, inputs: jax.Array, *, is_greedy: bool) -> PackedOutputs:
        """`is_greedy`: nobody needs more than a greedy program gives, where there is one."""
        step = (is_greedy and self._greedy_steps.get(shape)) or self._steps.get(shape)
        if step is None:
            raise InvariantError(f"{shape} is not in the grid compiled at start")
        self._state, outputs = step(self.weights, self._state, inputs)
        return outputs

    def _run_full(self, shape: StepShape) -> Callable[[], PackedOutputs]:
        """A step of this shape, ready to be called, in which every slot of the bucket drafts and verifies."""
        packed = self._batch.idle_inputs(shape)
        packed[:, Column.LIVE] = 1
        packed[:, Column.DRAFT_CAP] = self._config.topology.num_drafts(shape.draft_len)
        packed[:, Column.LIMIT] = self._config.max_model_len - 1
        inputs = self._placement.put_rows(packed)
        self._reset_slots()
        wait_until_done((self._state, inputs))
        return functools.partial(self._run, shape, inputs, is_greedy=True)

    def _chain_full(self, shape: StepShape, num_steps: int) -> Callable[[], list[PackedOutputs]]:
        step = self._run_full(shape)
        return lambda: [step() for _ in range(num_steps)]

    def _step(self, shape: Shape, *, is_greedy: bool = False) -> Step:
        return make_run(
            self._program,
            shape,
            self._placement,
            weight_specs=self._weight_specs,
            state_specs=self._state_specs,
            is_greedy=is_greedy,
        )

    def _traced(self, shape: Shape, *, is_greedy: bool) -> Step:
        step = self._step(shape, is_greedy=is_greedy)

        def traced(weights: Weights, state: DecodeState, packed: jax.Array) -> tuple[DecodeState, PackedOutputs]:
            self.num_traces += 1  # runs when traced, never when launched
            return step(weights, state, packed)

        return traced

    def _lower(self, shape: Shape, step: Step) -> Any:
        step.__name__ = _program_name(shape)
        return jax.jit(step, donate_argnums=1).lower(self.weights, self._state, self._idle_inputs(shape))

    def _idle_inputs(self, shape: Shape) -> jax.Array:
        return self._placement.put_rows(self._batch.idle_inputs(shape))

    def _reset_slots(self) -> None:
        num_slots = self._config.max_num_seqs
        specs = {"committed_len": self._state_specs.committed_len, "finished": self._state_specs.finished}
        fresh = {"committed_len": np.zeros(num_slots, np.int32), "finished": np.zeros(num_slots, bool)}
        self._state = replace(self._state, **self._placement.put(fresh, specs))


def _compile_threads() -> int:
    """One program each: XLA itself uses few of a machine's cores for one."""
    return max(_FEWEST_COMPILE_THREADS, (os.cpu_count() or 1) // 2)


def _program_name(shape: Shape) -> str:
    if isinstance(shape, StepShape):
        return f"decode_slots{shape.slots}_drafts{shape.draft_len}"
    return f"prefill_chunk{shape.chunk}"
