"""A batch drain on the host alone: the engine's real books and policy, a recorded cost for each step, no device.

Requests of unequal length are handed in together and the batch empties. Whether a draft is right is a hash of its
request, its place in the text and its position, held against a recorded rate, so every policy meets the same luck, and
a run is exact: the same in every place and at every time.
"""

import hashlib
import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtp_jax.core.config import CacheConfig, EngineConfig, SamplingParams, SpeculativeConfig
from mtp_jax.core.shapes import ShapeGrid
from mtp_jax.engine.decisions import PrefillDecision, StepDecision
from mtp_jax.engine.group import Group
from mtp_jax.engine.requests import Request
from mtp_jax.engine.results import LaunchResult, SlotResult, StepResult
from mtp_jax.engine.slots import SlotTable
from mtp_jax.policies.api import DraftLenPolicy
from mtp_jax.policies.schedule import NO_DRAFTS

ShapeKey = tuple[int, int]
_PROMPT_LEN = 8
_READBACK_DEPTH = 1


@dataclass(frozen=True)
class Recording:
    """What `mtp-jax bench policy --save` writes: step costs in seconds by (slots, K), and acceptance by position.

    `warm_up_s` is what a policy starts from; `in_use_s` the median of the same step in a real drain, where it ran.
    `rates[j]` is the share of drafts kept at position j of those whose predecessors all were.
    """

    chip: str
    warm_up_s: Mapping[ShapeKey, float]
    in_use_s: Mapping[ShapeKey, float]
    rates: tuple[float, ...]
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])  # how it was recorded: for readers

    def seconds(self, shape: ShapeKey) -> float:
        """What the step takes in the simulation: as in use, or as at warm-up where it never ran in use."""
        return self.in_use_s.get(shape, self.warm_up_s[shape])

    @property
    def max_draft_len(self) -> int:
        """Kmax of the recorded grid."""
        return max(draft_len for _, draft_len in self.warm_up_s)

    @property
    def max_num_slots(self) -> int:
        """The largest slots bucket of the recorded grid."""
        return max(slots for slots, _ in self.warm_up_s)

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it; `of_dict` is the inverse."""
        steps = [
            {"slots": slots, "draft_len": k, "warm_up_s": seconds, "in_use_s": self.in_use_s.get((slots, k))}
            for (slots, k), seconds in sorted(self.warm_up_s.items())
        ]
        return {"chip": self.chip, "facts": dict(self.facts), "rates": list(self.rates), "steps": steps}

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> "Recording":
        """Inverse of `as_dict`."""
        steps = {(step["slots"], step["draft_len"]): step for step in values["steps"]}
        return cls(
            chip=values["chip"],
            warm_up_s={shape: step["warm_up_s"] for shape, step in steps.items()},
            in_use_s={shape: step["in_use_s"] for shape, step in steps.items() if step["in_use_s"] is not None},
            rates=tuple(values["rates"]),
            facts=values["facts"],
        )

    @classmethod
    def read(cls, file: Path) -> "Recording":
        """Of a file that `write` wrote."""
        return cls.of_dict(json.loads(file.read_text()))

    def write(self, file: Path) -> None:
        """As JSON."""
        file.write_text(f"{json.dumps(self.as_dict(), indent=1)}\n")


@dataclass(frozen=True)
class DrainStep:
    """One decode step of the simulation."""

    slots: int
    draft_len: int
    num_tokens: int  # emitted
    seconds: float


@dataclass(frozen=True)
class Drain:
    """A drained batch: its decode steps in order, and the policy with what it has learnt."""

    steps: tuple[DrainStep, ...]
    policy: DraftLenPolicy

    @property
    def seconds(self) -> float:
        """Of all decode steps."""
        return math.fsum(step.seconds for step in self.steps)

    def tokens_per_s(self, slots: int | None = None) -> float:
        """Tokens emitted by decode steps over their time; of the phase with that slots bucket, or of all."""
        steps = [step for step in self.steps if slots is None or step.slots == slots]
        return sum(step.num_tokens for step in steps) / math.fsum(step.seconds for step in steps)

    @property
    def phases(self) -> tuple[int, ...]:
        """The slots buckets that ran, the largest first."""
        return tuple(sorted({step.slots for step in self.steps}, reverse=True))


def unequal_lengths(num_requests: int, longest: int) -> tuple[int, ...]:
    """Tokens to go by request, longest first: longest / sqrt(rank), at least 2.

    The longest hold the lowest slots, so the batch passes through every slots bucket and spends a like number of steps
    in each of them.

    >>> unequal_lengths(4, 100)
    (100, 71, 58, 50)
    """
    return tuple(max(2, math.ceil(longest / math.sqrt(rank))) for rank in range(1, num_requests + 1))


def totals_of(lengths: Sequence[int]) -> tuple[int, ...]:
    """`max_tokens` of requests that shall have `lengths` to go when the batch is full.

    Prefills and decode steps take turns, so each request has written a token for every one seated after it by then.

    >>> totals_of((100, 71, 58, 50))
    (104, 74, 60, 51)
    """
    return tuple(length + len(lengths) - index for index, length in enumerate(lengths))


def drain(
    recording: Recording, policy: DraftLenPolicy, lengths: Sequence[int], *, rates: Sequence[float] | None = None
) -> Drain:
    """Empties a batch of requests that have these many tokens to go, under the policy.

    `rates`: acceptance by position, the recorded one by default. Nothing is drafted and nothing counted until every
    request has its first token: what leads there is alike for every policy.
    """
    totals = totals_of(lengths)
    config = EngineConfig(
        max_model_len=_PROMPT_LEN + max(totals),
        max_num_seqs=recording.max_num_slots,
        cache=CacheConfig(page_size=16),
        speculative=SpeculativeConfig(num_speculative_tokens=recording.max_draft_len),
        readback_depth=_READBACK_DEPTH,
    )
    group = Group(config, ShapeGrid.of(config), lambda: NO_DRAFTS)
    (shard,) = group.shards
    for number, num_tokens in enumerate(totals):
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        group.submit(Request(str(number), (1,) * _PROMPT_LEN, params, seed=number))
    device = _Device(shard.slots, recording, recording.rates if rates is None else tuple(rates))
    in_flight: deque[LaunchResult] = deque()
    waiting_for = {str(number) for number in range(len(lengths))}
    num_filling: int | None = None
    while group.has_work:
        launch = group.decide()
        if launch is not None:
            (decision,) = launch.shards
            in_flight.append(LaunchResult(launch, (None if decision is None else device.run(decision),)))
        if len(in_flight) > _READBACK_DEPTH or (launch is None and in_flight):
            waiting_for.difference_update(p.request_id for p in group.reconcile(in_flight.popleft()))
        if num_filling is None and not waiting_for:
            shard.policy, num_filling = policy, len(device.steps)
    return Drain(tuple(device.steps[num_filling:]), shard.policy)


class _Device:
    """Knows lengths and nothing else: a slot's committed_len, and whether a draft would be right."""

    def __init__(self, slots: SlotTable, recording: Recording, rates: tuple[float, ...]) -> None:
        self.steps: list[DrainStep] = []
        self._slots = slots
        self._recording = recording
        self._rates = rates
        self._committed_len: dict[int, int] = {}  # by admission: nobody's row is taken over

    def run(self, decision: StepDecision | PrefillDecision) -> StepResult:
        if isinstance(decision, PrefillDecision):
            end = decision.start + decision.num_tokens
            self._committed_len[decision.admission] = end
            tokens = (0,) if decision.is_last else ()
            return StepResult(decision, (SlotResult(tokens, 0, 0, 0, end, False, (), ()),))
        results = tuple(self._decode(decided.slot, decided.admission, decided.draft_cap) for decided in decision.slots)
        shape = decision.shape
        seconds = self._recording.seconds((shape.slots, shape.draft_len))
        self.steps.append(DrainStep(shape.slots, shape.draft_len, sum(len(r.tokens) for r in results), seconds))
        return StepResult(decision, results, seconds)

    def _decode(self, index: int, admission: int, draft_cap: int) -> SlotResult:
        slot = self._slots.find(index, admission)
        start = self._committed_len[admission]
        if slot is None or start >= slot.state.limit:
            return SlotResult((), 0, 0, 0, start, True, (), ())
        left = slot.state.limit - start
        cap = min(draft_cap, left - 1)
        num_right = next(
            (j for j in range(cap) if not _is_right(slot.state.request.request_id, start, j, self._rates[j])), cap
        )
        end = self._committed_len[admission] = start + num_right + 1
        return SlotResult((0,) * (num_right + 1), num_right, cap, cap, end, end == slot.state.limit, (), ())


def _is_right(request_id: str, position: int, draft: int, rate: float) -> bool:
    """Whether draft number `draft` of a step that starts at `position` is right: with probability `rate`."""
    digest = hashlib.blake2b(f"{request_id}/{position}/{draft}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < rate * 2**64
