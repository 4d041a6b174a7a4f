"""A launch's outputs as plain Python values, with the decision they belong to."""

from dataclasses import dataclass

from mtp_jax.engine.decisions import Decision, LaunchDecision
from mtp_jax.engine.requests import TokenLogprob
from mtp_jax.engine.vote import Wish


@dataclass(frozen=True)
class SlotResult:
    """What the device reports of one slot."""

    tokens: tuple[int, ...]  # emitted
    num_accepted: int
    num_drafted: int
    draft_depth: int  # the longest path among the drafts; of a chain their number
    committed_len: int
    finished: bool
    drafts: tuple[int, ...]
    target_tokens: tuple[int, ...]
    parents: tuple[int, ...] | None = None  # of the drafts of a tree; see `StepRecord`
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of `PrefillDecision.scored`


@dataclass(frozen=True)
class StepResult:
    """One data shard's part: `slots[i]` belongs to `decision.slots[i]` (decode) or to the decision's slot (prefill)."""

    decision: Decision
    slots: tuple[SlotResult, ...]
    elapsed_s: float | None = None  # how long the device took for the step, where it could be told


@dataclass(frozen=True)
class LaunchResult:
    """Of a whole launch: `shards[i]` is None where `launch.shards[i]` is; `agreed` where the group votes."""

    launch: LaunchDecision
    shards: tuple[StepResult | None, ...]
    agreed: Wish | None = None
