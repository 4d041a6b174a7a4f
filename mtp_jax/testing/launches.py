"""What an engine's launches were given: enough to do a step again, by hand, beside the engine."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mtp_jax.core.shapes import Shape
from mtp_jax.core.types import DecodeState
from mtp_jax.engine.decisions import LaunchDecision
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.readback import Launch
from mtp_jax.models.api import Weights


@dataclass(frozen=True)
class LaunchInputs:
    """The arguments of `step.decode.decode_step` (or of `prefill_step`, by the shape), as they were before the launch.

    `packed_BX` is the launch's one upload, `state` a copy of what the launch was given to keep.
    """

    shape: Shape
    weights: Weights
    state: DecodeState
    packed_BX: jax.Array


@contextmanager
def recorded_launches(engine: Engine) -> Generator[list[LaunchInputs]]:
    """A list that gains an entry with every launch while the context is open.

    Copies the whole state each time: for small engines and few steps.
    """
    launcher, recorded = engine.launcher, list[LaunchInputs]()
    launch = launcher.launch

    def recording(decision: LaunchDecision, inputs: jax.Array) -> Launch:
        state = jax.tree.map(jnp.copy, launcher._state)
        recorded.append(LaunchInputs(decision.shape, launcher.weights, state, inputs))
        return launch(decision, inputs)

    launcher.launch = recording
    try:
        yield recorded
    finally:
        del launcher.launch  # the method shows again
