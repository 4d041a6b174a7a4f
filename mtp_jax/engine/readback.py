"""The only module that turns device values into host values, and the queue that makes it late."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from mtp_jax.core.layout import OutputColumn
from mtp_jax.core.types import Logprobs, PackedOutputs
from mtp_jax.engine.decisions import Decision, PrefillDecision
from mtp_jax.engine.requests import TokenLogprob
from mtp_jax.engine.results import SlotResult, StepResult


@dataclass(frozen=True)
class Launch:
    """A launch in flight: what it was asked to do, and the buffers its results will be in."""

    decision: Decision
    outputs: PackedOutputs


class Readback:
    """Launches in flight, oldest first. With depth d, results are read once d newer launches are under way."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._queue: deque[Launch] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, launch: Launch) -> None:
        """Takes in a launch."""
        self._queue.append(launch)

    def ready(self, *, is_idle: bool) -> list[StepResult]:
        """Results due now; when nothing could be launched (`is_idle`), at least the oldest one."""
        results = []
        while len(self._queue) > self._depth or (is_idle and self._queue and not results):
            results.append(_read(self._queue.popleft()))
        return results


def start_copy(launch: Launch) -> None:
    """Starts the copy of a launch's outputs to the host, without waiting; log-probabilities only if asked for.

    The one transfer that a device-to-host guard around the loop must let pass: it blocks nobody.
    """
    wanted = launch.outputs if launch.decision.wants_logprobs else launch.outputs.small_BX
    with jax.transfer_guard_device_to_host("allow"):
        for array in jax.tree.leaves(wanted):
            array.copy_to_host_async()


def wait_until_done(tree: Any) -> None:
    """Blocks until every array is computed: for warm-up and timing, never in the loop."""
    jax.block_until_ready(tree)


def fastest_in_turns(prepare: Sequence[Callable[[], Callable[[], Any]]], rounds: int) -> list[float]:
    """Seconds to completion of each prepared call, the fastest of `rounds`; preparing is not timed.

    Every round times all of them, so that a busy spell of the machine meets all alike; what it adds is never negative,
    which makes the fastest the best estimate.
    """
    fastest = [float("inf")] * len(prepare)
    for _ in range(rounds):
        for index, ready in enumerate(prepare):
            call = ready()
            start = time.perf_counter()
            wait_until_done(call())
            fastest[index] = min(fastest[index], time.perf_counter() - start)
    return fastest


def _read(launch: Launch) -> StepResult:
    decision, outputs = launch.decision, launch.outputs
    if isinstance(decision, PrefillDecision):
        draft_len, rows, wants_logprobs = 0, (0,), (decision.wants_logprobs,)
    else:
        draft_len = decision.shape.draft_len
        rows = tuple(decided.slot for decided in decision.slots)
        wants_logprobs = tuple(decided.wants_logprobs for decided in decision.slots)
    small = jax.device_get(outputs.small_BX).tolist()  # explicit, so that a guard can forbid all other reads
    logprobs = jax.device_get(outputs.logprobs) if decision.wants_logprobs else None
    return StepResult(
        decision,
        tuple(
            _slot_result(small[row], draft_len, logprobs if wants else None, row)
            for row, wants in zip(rows, wants_logprobs, strict=True)
        ),
    )


def _slot_result(columns: list[int], draft_len: int, logprobs: Logprobs | None, row: int) -> SlotResult:
    first_target = len(columns) - (draft_len + 1)
    first_draft = first_target - draft_len
    num_fixed = len(OutputColumn)
    tokens = tuple(columns[num_fixed : num_fixed + columns[OutputColumn.NUM_EMITTED]])
    return SlotResult(
        tokens=tokens,
        num_accepted=columns[OutputColumn.NUM_ACCEPTED],
        num_drafted=columns[OutputColumn.NUM_DRAFTED],
        committed_len=columns[OutputColumn.COMMITTED_LEN],
        finished=bool(columns[OutputColumn.FINISHED]),
        drafts=tuple(columns[first_draft:first_target]),
        target_tokens=tuple(columns[first_target:]),
        logprobs=() if logprobs is None else _token_logprobs(logprobs, row, tokens),
    )


def _token_logprobs(logprobs: Logprobs, row: int, tokens: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            token=token,
            logprob=float(logprobs.chosen_BE[row, column]),
            rank=int(logprobs.rank_BE[row, column]),
            top=tuple(
                zip(
                    logprobs.top_ids_BEQ[row, column].tolist(),
                    logprobs.top_BEQ[row, column].tolist(),
                    strict=True,
                )
            ),
        )
        for column, token in enumerate(tokens)
    )
