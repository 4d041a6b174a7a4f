"""What a shard wishes of a step to come, how wishes become one agreement, and how that becomes the step's shape.

Every process of a mesh must launch the same sequence of programs. So each data shard hands a few integers in with an
earlier launch; the step reduces them by one elementwise maximum (`Parallel.largest`), and the result comes back with
the outputs that are read anyway. With readback depth d the shape of step n is agreed from the wishes that travelled
with step n - d - 1. Where one process schedules one data shard, its wish is the agreement and nothing is exchanged.

The K agreed is the smallest wish of the shards that have something to decode; the others abstain.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mtp_jax.core.config import SamplingParams
from mtp_jax.core.layout import AgreedColumn, VoteColumn
from mtp_jax.core.shapes import PrefillShape, Shape, ShapeGrid, StepShape
from mtp_jax.policies.api import DraftLenPolicy, PolicyView, by_view

_ABSTENTION = -(2**30)


@dataclass(frozen=True)
class Wish:
    """One shard's facts for a step to come; with the maximum of each field over the shards, also what was agreed."""

    alive: bool = False  # some request is unfinished
    num_slots: int = 0  # slots 0..num_slots-1 are to be covered
    chunk: int = 0  # prompt tokens to prefill; 0: none
    draft_len: int | None = None  # None: abstains, having nothing to decode
    useful_drafts: int = 0  # the most drafts that some slot could still use
    num_decoding: int = 0  # slots to decode: the largest shard's batch, once agreed
    whole_logits: bool = False  # some slot's tokens are not simply the most likely ones
    logprobs: bool = False  # some slot wants log-probabilities
    prompt_logprobs: bool = False  # those of its prompt

    def columns(self) -> list[int]:
        """As integers whose maximum is the agreement: the draft length is negated, for the smallest one to win.

        >>> wish = Wish(alive=True, num_slots=3, draft_len=2, useful_drafts=3, num_decoding=3)
        >>> Wish.of_columns(wish.columns()) == wish
        True
        """
        by_column = {
            VoteColumn.ALIVE: int(self.alive),
            VoteColumn.SLOTS: self.num_slots,
            VoteColumn.CHUNK: self.chunk,
            VoteColumn.FEWER_DRAFTS: _ABSTENTION if self.draft_len is None else -self.draft_len,
            VoteColumn.USEFUL_DRAFTS: self.useful_drafts,
            VoteColumn.NUM_DECODING: self.num_decoding,
            VoteColumn.WHOLE_LOGITS: int(self.whole_logits),
            VoteColumn.LOGPROBS: int(self.logprobs),
            VoteColumn.PROMPT_LOGPROBS: int(self.prompt_logprobs),
        }
        return [by_column[column] for column in VoteColumn]

    @classmethod
    def of_columns(cls, columns: Sequence[int]) -> "Wish":
        """Inverse of `columns`."""
        fewer_drafts = columns[VoteColumn.FEWER_DRAFTS]
        return cls(
            alive=bool(columns[VoteColumn.ALIVE]),
            num_slots=columns[VoteColumn.SLOTS],
            chunk=columns[VoteColumn.CHUNK],
            draft_len=None if fewer_drafts == _ABSTENTION else -fewer_drafts,
            useful_drafts=columns[VoteColumn.USEFUL_DRAFTS],
            num_decoding=columns[VoteColumn.NUM_DECODING],
            whole_logits=bool(columns[VoteColumn.WHOLE_LOGITS]),
            logprobs=bool(columns[VoteColumn.LOGPROBS]),
            prompt_logprobs=bool(columns[VoteColumn.PROMPT_LOGPROBS]),
        )


@dataclass(frozen=True)
class LaunchNeeds:
    """What a launch's programs compute beside greedy tokens. A slot that needs more sits out until it is agreed."""

    whole_logits: bool = True
    logprobs: bool = True
    prompt_logprobs: bool = True

    @classmethod
    def of(cls, params: SamplingParams) -> "LaunchNeeds":
        """What one request needs."""
        return cls(
            whole_logits=params.temperature > 0 or params.edits_logits or params.thinking_token_ids is not None,
            logprobs=params.logprobs is not None,
            prompt_logprobs=params.prompt_logprobs is not None,
        )

    def cover(self, others: "LaunchNeeds") -> bool:
        """Whether a request that needs these others may take part."""
        return (
            self.whole_logits >= others.whole_logits
            and self.logprobs >= others.logprobs
            and self.prompt_logprobs >= others.prompt_logprobs
        )

    @property
    def is_nothing(self) -> bool:
        """The most likely tokens are all that is asked for."""
        return self == _NOTHING

    def columns(self) -> list[int]:
        """As a launch carries them."""
        by_column = {
            AgreedColumn.WHOLE_LOGITS: int(self.whole_logits),
            AgreedColumn.LOGPROBS: int(self.logprobs),
            AgreedColumn.PROMPT_LOGPROBS: int(self.prompt_logprobs),
        }
        return [by_column[column] for column in AgreedColumn]


EVERYTHING = LaunchNeeds()
_NOTHING = LaunchNeeds(whole_logits=False, logprobs=False, prompt_logprobs=False)


def agree(wishes: Sequence[Wish]) -> Wish:
    """What the step's reduction makes of the shards' wishes; on the host, for tests and models of the group.

    >>> agree([Wish(True, 5, 0, 2, 3, 5), Wish()]).draft_len, agree([Wish(draft_len=0), Wish(draft_len=3)]).draft_len
    (2, 0)
    """
    return Wish.of_columns([max(column) for column in zip(*(wish.columns() for wish in wishes), strict=True)])


def shape_of(
    agreed: Wish, grid: ShapeGrid, policy: DraftLenPolicy, *, after_prefill: bool, step_number: int
) -> Shape | None:
    """The shape of the step that was agreed on, None when nobody is alive: alike on every process.

    After a prefill the next step decodes if anyone can. A step in which nobody can do anything is the smallest one.
    """
    if not agreed.alive:
        return None
    if agreed.chunk > 0 and not (after_prefill and agreed.num_decoding > 0):
        return grid.choose_prefill(agreed.chunk)
    if agreed.num_decoding == 0:
        return grid.choose(1, 0)
    longest = min(agreed.draft_len or 0, agreed.useful_drafts)
    shape = grid.choose(agreed.num_slots, longest)
    if longest == 0:
        return shape
    # What follows from the batch alone is asked here, about the group's: every process gets the same answer.
    view = PolicyView(agreed.num_decoding, shape.slots, grid.max_draft_len, step_number)
    return StepShape(shape.slots, min(longest, by_view(policy, view)))


def start_shape(grid: ShapeGrid) -> PrefillShape:
    """The shape of a group's first steps, of which nothing can have been agreed: prompts are waiting then."""
    return PrefillShape(grid.chunk_buckets[-1])
