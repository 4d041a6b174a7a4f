"""Columns of the one int32 array that carries a launch's inputs to the device, and of the one that brings results back.

One transfer each way instead of a dozen; the host's side (`engine/batch.py`, `engine/readback.py`) and the device's
(`core/types.py`) take the column numbers from here. Floats travel as their bit patterns. After a slot's fixed input
columns: stop ids, the page table, and where the mesh votes on its steps the shard's wish. What is large and never
changes, logit biases and bad words, travels once, with the prompt.
"""

from dataclasses import dataclass
from enum import IntEnum, auto


class _FromZero(IntEnum):
    """Members number themselves from 0, in the order in which they are written."""

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:  # noqa: ARG004
        return count


class Column(_FromZero):
    """Per-slot columns of a launch."""

    LIVE = auto()
    DRAFT_CAP = auto()
    LIMIT = auto()
    KEY_HIGH = auto()
    KEY_LOW = auto()
    TEMPERATURE = auto()
    TOP_K = auto()
    TOP_P = auto()
    MIN_P = auto()
    NUM_LOGPROBS = auto()
    PROMPT_LEN = auto()
    MIN_TOKENS = auto()
    NUM_STOP_IDS = auto()
    PRESENCE_PENALTY = auto()
    FREQUENCY_PENALTY = auto()
    REPETITION_PENALTY = auto()
    NUM_BIASES = auto()
    NUM_BAD_WORDS = auto()
    THINKING_BEGINS = auto()
    THINKING_ENDS = auto()


class PrefillColumn(_FromZero):
    """Columns in front of the per-slot ones in a prefill launch; after all of them: lists, then the whole prompt.

    Whole, not the chunk alone: its beginning may lie in pages that another request filled, and drafting looks past it.
    """

    SLOT = auto()
    START = auto()
    NUM_TOKENS = auto()
    NUM_KNOWN = auto()
    IS_FIRST = auto()
    IS_LAST = auto()
    PENDING_TOKEN = auto()
    PROMPT_LOGPROBS = auto()


class OutputColumn(_FromZero):
    """Per-slot columns of what a launch sends back; after them: emitted tokens E, drafts K, target tokens W.

    Where drafts are trees, last: the drafts' parents K.
    """

    NUM_EMITTED = auto()
    NUM_ACCEPTED = auto()
    NUM_DRAFTED = auto()
    DRAFT_DEPTH = auto()
    COMMITTED_LEN = auto()
    FINISHED = auto()


class AgreedColumn(_FromZero):
    """What the group agreed that some slot of this launch needs: the same on every device, as branches on it must be.

    Where steps are voted on: after the page table, in every shard's first row; then the `VoteColumn`s.
    """

    WHOLE_LOGITS = auto()
    LOGPROBS = auto()
    PROMPT_LOGPROBS = auto()


class VoteColumn(_FromZero):
    """A shard's wish for a later step, and what the group agreed: see `engine.vote`.

    Where steps are voted on: last in a launch's rows, of which the shard's first counts; on the way back right after
    the fixed `OutputColumn`s.
    """

    ALIVE = auto()
    SLOTS = auto()
    CHUNK = auto()
    FEWER_DRAFTS = auto()
    USEFUL_DRAFTS = auto()
    NUM_DECODING = auto()
    WHOLE_LOGITS = auto()
    LOGPROBS = auto()
    PROMPT_LOGPROBS = auto()


@dataclass(frozen=True)
class ListSizes:
    """Room for the longer lists of one request: logit biases A, bad words M of at most O tokens each.

    As columns of a prefill: the biases' ids, their values, then the bad words, each ending at the end of its room.
    """

    num_biases: int
    num_bad_words: int
    bad_word_len: int

    @property
    def num_columns(self) -> int:
        """Columns that they take."""
        return 2 * self.num_biases + self.num_bad_words * self.bad_word_len


NULL_PAGE = 0
"""The page that nobody holds: where writes go that nobody must see."""
NO_TOKEN = -1
"""Marks an unused stop id or place of a bad word, a request without thinking tokens, and a prefill whose pending token
is to be drawn (not resumed)."""
NO_LOGPROBS = -1
