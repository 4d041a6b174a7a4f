"""The frozen record of one launch. Everything about the launch derives from it; nobody re-derives it."""

from dataclasses import dataclass

from mtp_jax.core.shapes import PrefillShape, Shape, StepShape
from mtp_jax.engine.vote import EVERYTHING, LaunchNeeds, Wish


@dataclass(frozen=True)
class SlotDecision:
    """One slot's part in a decode launch. `num_pages` it holds at launch.

    What it may draft, what it may gain and what it may write are three facts: see `core.topology`.
    """

    slot: int
    admission: int
    draft_cap: int
    max_emitted: int  # the bound on its length grows by this much
    num_positions: int  # reserved for the launch, from the bound on
    num_pages: int
    wants_logprobs: bool


@dataclass(frozen=True)
class StepDecision:
    """A decode launch: its compiled shape (K included) and the slots that take part."""

    number: int
    shape: StepShape
    slots: tuple[SlotDecision, ...]

    @property
    def wants_logprobs(self) -> bool:
        """Some slot asked for log-probabilities."""
        return any(decided.wants_logprobs for decided in self.slots)


@dataclass(frozen=True)
class PrefillDecision:
    """A prefill launch: one chunk of one slot's prompt."""

    number: int
    shape: PrefillShape
    slot: int
    admission: int
    start: int
    num_tokens: int
    is_first: bool
    is_last: bool
    wants_logprobs: bool
    scored: tuple[int, ...] = ()  # tokens after the chunk's first ones, if their log-probabilities are wanted


Decision = StepDecision | PrefillDecision


@dataclass(frozen=True)
class LaunchDecision:
    """One launch of the whole group: its shape, and the part of each data shard that this process schedules.

    `shards[i]` is None where the shard has nothing to do in it: its rows are padding. `wishes[i]` travels with the
    launch where the group votes (see `engine.vote`); empty where it does not. `needs` bounds what its slots ask for:
    as was agreed, or where nothing is voted on what the shard's slots ask for now.
    """

    number: int
    shape: Shape
    shards: tuple[Decision | None, ...]
    wishes: tuple[Wish, ...] = ()
    needs: LaunchNeeds = EVERYTHING

    @property
    def wants_logprobs(self) -> bool:
        """Some slot asked for log-probabilities."""
        return any(shard is not None and shard.wants_logprobs for shard in self.shards)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Log-probabilities of some prompt's tokens are wanted."""
        return any(isinstance(shard, PrefillDecision) and bool(shard.scored) for shard in self.shards)
