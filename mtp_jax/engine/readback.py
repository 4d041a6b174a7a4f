"""The only module that turns device values into host values, and the queue that makes it late."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from mtp_jax.core.layout import OutputColumn, VoteColumn
from mtp_jax.core.shapes import StepShape
from mtp_jax.core.topology import Topology
from mtp_jax.core.types import Logprobs, PackedOutputs
from mtp_jax.engine.decisions import LaunchDecision, PrefillDecision, StepDecision
from mtp_jax.engine.requests import TokenLogprob
from mtp_jax.engine.results import LaunchResult, SlotResult, StepResult
from mtp_jax.engine.vote import Wish


@dataclass(frozen=True)
class Launch:
    """A launch in flight: what it was asked to do, and the buffers its results will be in."""

    decision: LaunchDecision
    outputs: PackedOutputs


class Readback:
    """Launches in flight, oldest first. With depth d, results are read once d newer launches are under way."""

    def __init__(self, depth: int, topology: Topology) -> None:
        self._depth = depth
        self._topology = topology
        self._queue: deque[tuple[Launch, float]] = deque()
        self._last_read_s = float("-inf")

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, launch: Launch) -> None:
        """Takes in a launch."""
        self._queue.append((launch, time.perf_counter()))

    def ready(self, *, is_idle: bool) -> list[LaunchResult]:
        """Results due now; when nothing could be launched (`is_idle`), at least the oldest one."""
        results: list[LaunchResult] = []
        while len(self._queue) > self._depth or (is_idle and self._queue and not results):
            results.append(self._read_oldest())
        return results

    def _read_oldest(self) -> LaunchResult:
        """Its time runs from its launch, or from the result before it if that came later: the device was busy then."""
        launch, launched_s = self._queue.popleft()
        small_BX = _host_rows(launch.outputs.small_BX).tolist()
        now_s = time.perf_counter()
        elapsed_s, self._last_read_s = now_s - max(launched_s, self._last_read_s), now_s
        return _result(launch, small_BX, elapsed_s, self._topology)


def start_copy(launch: Launch) -> None:
    """Starts the copy of a launch's outputs to the host, without waiting; log-probabilities only those asked for.

    The one transfer that a device-to-host guard around the loop must let pass: it blocks nobody.
    """
    decision, outputs = launch.decision, launch.outputs
    wanted = (
        outputs.small_BX,
        outputs.logprobs if decision.wants_logprobs else None,
        outputs.prompt_logprobs if decision.wants_prompt_logprobs else None,
    )
    with jax.transfer_guard_device_to_host("allow"):
        for array in jax.tree.leaves(wanted):
            for part in _parts(array):
                part.copy_to_host_async()


def _parts(array: jax.Array) -> list[jax.Array]:
    """What `_host_rows` reads of it, in the order of its rows."""
    if array.is_fully_addressable:
        return [array]
    parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return [parts[start] for start in sorted(parts)]


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


def _host_rows(array_BX: jax.Array) -> np.ndarray:
    """The rows of the data shards that this process schedules, in order. Explicit: a guard can forbid all other reads.

    Of several devices that hold the same rows (the `model` axis) one is read.
    """
    if array_BX.is_fully_addressable:
        return jax.device_get(array_BX)
    return np.concatenate([jax.device_get(part) for part in _parts(array_BX)])


def _result(launch: Launch, small_BX: list[list[int]], elapsed_s: float, topology: Topology) -> LaunchResult:
    decision = launch.decision
    num_drafts = topology.num_drafts(decision.shape.draft_len) if isinstance(decision.shape, StepShape) else 0
    widths = _Widths(len(VoteColumn) if decision.wishes else 0, num_drafts, num_drafts if topology.is_tree else None)
    rows_per_shard = len(small_BX) // len(decision.shards)
    logprobs = prompt_logprobs = None
    if decision.wants_logprobs:
        logprobs = jax.tree.map(_host_rows, launch.outputs.logprobs)
    if decision.wants_prompt_logprobs:
        prompt_logprobs = jax.tree.map(_host_rows, launch.outputs.prompt_logprobs)
    shards: list[StepResult | None] = []
    for index, part in enumerate(decision.shards):
        first = index * rows_per_shard
        if isinstance(part, StepDecision):
            rows = [(first + decided.slot, decided.wants_logprobs) for decided in part.slots]
        else:
            rows = [] if part is None else [(first, part.wants_logprobs)]
        slots = tuple(_slot_result(small_BX[row], widths, logprobs if wants else None, row) for row, wants in rows)
        if isinstance(part, PrefillDecision) and part.scored and prompt_logprobs is not None:
            slots = (replace(slots[0], prompt_logprobs=_token_logprobs(prompt_logprobs, first, part.scored)),)
        shards.append(None if part is None else StepResult(part, slots, elapsed_s))
    agreed = None
    if widths.num_voted:
        agreed = Wish.of_columns(small_BX[0][len(OutputColumn) : len(OutputColumn) + widths.num_voted])
    return LaunchResult(decision, tuple(shards), agreed)


@dataclass(frozen=True)
class _Widths:
    """Columns of a row's parts, the fixed ones and the emitted tokens apart. `num_parents` None: a chain."""

    num_voted: int
    num_drafts: int
    num_parents: int | None


def _slot_result(columns: list[int], widths: _Widths, logprobs: Logprobs | None, row: int) -> SlotResult:
    first_parent = len(columns) - (widths.num_parents or 0)
    first_target = first_parent - (widths.num_drafts + 1)
    first_draft = first_target - widths.num_drafts
    first_token = len(OutputColumn) + widths.num_voted
    tokens = tuple(columns[first_token : first_token + columns[OutputColumn.NUM_EMITTED]])
    return SlotResult(
        tokens=tokens,
        num_accepted=columns[OutputColumn.NUM_ACCEPTED],
        num_drafted=columns[OutputColumn.NUM_DRAFTED],
        draft_depth=columns[OutputColumn.DRAFT_DEPTH],
        committed_len=columns[OutputColumn.COMMITTED_LEN],
        finished=bool(columns[OutputColumn.FINISHED]),
        drafts=tuple(columns[first_draft:first_target]),
        target_tokens=tuple(columns[first_target:first_parent]),
        parents=None if widths.num_parents is None else tuple(columns[first_parent:]),
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
