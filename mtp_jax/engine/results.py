"""A launch's outputs as plain Python values, with the decision they belong to."""

from dataclasses import dataclass

from mtp_jax.engine.decisions import Decision
from mtp_jax.engine.requests import TokenLogprob


@dataclass(frozen=True)
class SlotResult:
    """What the device reports of one slot."""

    tokens: tuple[int, ...]  # emitted
    num_accepted: int
    num_drafted: int
    committed_len: int
    finished: bool
    drafts: tuple[int, ...]
    target_tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class StepResult:
    """`slots[i]` belongs to `decision.slots[i]` (decode) or to the decision's one slot (prefill)."""

    decision: Decision
    slots: tuple[SlotResult, ...]
