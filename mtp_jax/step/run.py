"""One launch as it is compiled: a step on every device's part of the mesh, and the vote on a later one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from mtp_jax.core.layout import AgreedColumn, VoteColumn
from mtp_jax.core.shapes import Shape, StepShape
from mtp_jax.core.types import DecodeState, Logprobs, Needs, PackedOutputs
from mtp_jax.models.api import Weights
from mtp_jax.ops.placement import Placement
from mtp_jax.step.decode import decode_step
from mtp_jax.step.prefill import prefill_step
from mtp_jax.step.program import StepProgram

Run = Callable[[Weights, DecodeState, jax.Array], tuple[DecodeState, PackedOutputs]]


def make_run(
    program: StepProgram,
    shape: Shape,
    placement: Placement,
    *,
    weight_specs: Any,
    state_specs: Any,
    is_greedy: bool = False,
) -> Run:
    """The function to compile for a shape: (weights, state, uploaded rows) -> (state, outputs).

    `is_greedy`: for launches of which it is known that nobody needs more than the most likely tokens.
    """

    def run(weights: Weights, state: DecodeState, packed_BX: Int[Array, "B X"]) -> tuple[DecodeState, PackedOutputs]:
        agreed, wish_V = None, None
        if program.is_voting:
            packed_BX, agreed, wish_V = _split(packed_BX)
        agreed = Needs.nothing() if is_greedy else agreed
        if isinstance(shape, StepShape):
            state, outputs = decode_step(weights, state, packed_BX, program=program, shape=shape, agreed=agreed)
        else:
            state, outputs = prefill_step(weights, state, packed_BX, program=program, shape=shape, agreed=agreed)
        return state, outputs.pack(None if wish_V is None else program.parallel.largest(wish_V))

    rows = placement.rules.spec("slots")
    logprobs = Logprobs(rows, rows, rows, rows)  # type: ignore[arg-type]
    of_tokens = None if is_greedy else logprobs
    outputs = PackedOutputs(rows, of_tokens, None if isinstance(shape, StepShape) else of_tokens)  # type: ignore[arg-type]
    return placement.map(run, (weight_specs, state_specs, rows), (state_specs, outputs))


def _split(packed_BX: Int[Array, "B X"]) -> tuple[Int[Array, "B Y"], Needs, Int[Array, " V"]]:
    """The slots' columns, what the launch needs, and the shard's wish."""
    num_slot_columns = packed_BX.shape[1] - len(AgreedColumn) - len(VoteColumn)
    agreed_A, wish_V = jnp.split(packed_BX[0, num_slot_columns:], [len(AgreedColumn)])
    needs = Needs(
        whole_logits=agreed_A[AgreedColumn.WHOLE_LOGITS] != 0,
        logprobs=agreed_A[AgreedColumn.LOGPROBS] != 0,
        prompt_logprobs=agreed_A[AgreedColumn.PROMPT_LOGPROBS] != 0,
    )
    return packed_BX[:, :num_slot_columns], needs, wish_V
