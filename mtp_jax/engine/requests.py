"""What a caller sends and gets, and the bookkeeping of one request. Token ids only: text lives in `llm.py`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from typing import Protocol

from mtp_jax.core.config import FinishReason, SamplingParams
from mtp_jax.core.errors import InvariantError


class TokenWatcher(Protocol):
    """Sees every emitted token in order and may end the request: how stop strings reach an engine without text."""

    def feed(self, tokens: Sequence[int]) -> "Cut | None":
        """The cut that these new tokens complete, or None to go on."""
        ...


@dataclass(frozen=True)
class Cut:
    """Ends a request after the first `num_tokens` of the tokens just fed."""

    num_tokens: int
    stop_reason: int | str


@dataclass(frozen=True)
class Request:
    """One prompt and how its tokens are wanted. `seed` is resolved: same seed and prompt, same tokens."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    watcher: TokenWatcher | None = None
    wants_trace: bool = False

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end the request: the caller's, and the model's end-of-text ids unless ignored."""
        eos = () if self.params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*eos, *(self.params.stop_token_ids or ()))))

    @property
    def held_back_ids(self) -> tuple[int, ...]:
        """Ids banned until `min_tokens` are written: `stop_ids`, then end-of-text ids that do not end this request."""
        return tuple(dict.fromkeys((*self.stop_ids, *self.eos_token_ids)))

    def longest_text(self, max_model_len: int) -> int:
        """Tokens at most, the prompt included."""
        max_tokens = self.params.max_tokens
        return max_model_len if max_tokens is None else min(len(self.prompt) + max_tokens, max_model_len)


class RequestStatus(StrEnum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class TokenLogprob:
    """Raw log-probability of a token of the text, its rank (1: most likely), and the most likely alternatives."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class StepRecord:
    """One decode step of one request, as `LLM.trace` shows it. Lengths are in tokens, tokens are ids.

    `draft_len`: K of the launch, which `launch` numbers; `draft_cap`: the slot's own limit in it, as the host bounded
    it. `drafts`: those that could stand; `num_accepted` of them did. `committed_len_before` and `committed_len_after`:
    positions whose keys and values are final. `num_pages`: pages that the slot held.
    `emitted` begins with the accepted drafts; under `acceptance="match"` all of it are target tokens.
    `target_tokens[w]` is what the target says after row w: the pending token (row 0) or draft w - 1. In a chain each
    draft follows the one before it. In a tree (`parents` not None) draft i follows row `parents[i]`.
    """

    draft_len: int  # K of the launch
    draft_cap: int  # the slot's own limit in it
    drafts: tuple[int, ...]
    target_tokens: tuple[int, ...]
    num_accepted: int
    emitted: tuple[int, ...]
    committed_len_before: int
    committed_len_after: int
    num_pages: int
    parents: tuple[int, ...] | None = None
    launch: int = 0  # the engine's number for it: requests of one launch share it


@dataclass
class RequestMetrics:
    """What speculation did for one request. Rates count verified drafts only; the bonus token is never one.

    `num_draft_tokens` drafts were verified, and `num_accepted_tokens` of them stood. `num_preemptions`: times it gave
    its slot up; `num_cached_tokens` of its prompt lay in pages that others had filled.
    Of a tree `num_draft_tokens` counts every node, the lists by position count paths: a step adds one for each level
    that its tree reached, or that was accepted.
    `num_steps`: decode steps read; `draft_lens`: K of each. By place j in a chain: `drafted_per_pos[j]` steps made a
    draft there, and in `accepted_per_pos[j]` of them it stood and all before it did.

    >>> metrics = RequestMetrics()
    >>> metrics.count_step(draft_len=3, num_drafted=3, num_accepted=2, draft_depth=3)
    >>> metrics.count_step(draft_len=3, num_drafted=1, num_accepted=0, draft_depth=1)
    >>> metrics.mean_acceptance_length, metrics.drafted_per_pos, metrics.accepted_per_pos
    (2.0, [2, 1, 1], [1, 1])
    """

    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list[int])
    drafted_per_pos: list[int] = field(default_factory=list[int])
    draft_lens: list[int] = field(default_factory=list[int])
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of the prompt, in pages that another request had filled

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens a decode step emitted: 1 + accepted drafts per step (1.0 when there was no step)."""
        return 1.0 + self.num_accepted_tokens / self.num_steps if self.num_steps else 1.0

    def count_step(self, draft_len: int, num_drafted: int, num_accepted: int, draft_depth: int) -> None:
        """Adds one verified step."""
        self.num_steps += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        self.draft_lens.append(draft_len)
        add_per_position(self.drafted_per_pos, draft_depth)
        add_per_position(self.accepted_per_pos, num_accepted)


def merged_metrics(each: Sequence[RequestMetrics]) -> RequestMetrics:
    """Of several requests together."""
    if len(each) == 1:
        return each[0]
    return RequestMetrics(
        num_steps=sum(one.num_steps for one in each),
        num_draft_tokens=sum(one.num_draft_tokens for one in each),
        num_accepted_tokens=sum(one.num_accepted_tokens for one in each),
        accepted_per_pos=_sums([one.accepted_per_pos for one in each]),
        drafted_per_pos=_sums([one.drafted_per_pos for one in each]),
        draft_lens=[draft_len for one in each for draft_len in one.draft_lens],
        num_preemptions=sum(one.num_preemptions for one in each),
        num_cached_tokens=sum(one.num_cached_tokens for one in each),
    )


def _sums(lists: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*lists, fillvalue=0)]


def add_per_position(counts: list[int], length: int) -> None:
    """Adds one to the first `length` positions, growing the list as needed."""
    counts.extend([0] * (length - len(counts)))
    for position in range(length):
        counts[position] += 1


@dataclass
class RequestState:
    """A request's life in the engine. Written by the scheduler alone."""

    request: Request
    limit: int  # the committed_len at which it is finished by length
    status: RequestStatus = RequestStatus.WAITING
    tokens: list[int] = field(default_factory=list[int])  # emitted so far
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])  # of its second token on
    records: list[StepRecord] = field(default_factory=list[StepRecord])
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    page_keys: tuple[bytes, ...] = ()  # of the first `num_keyed` tokens' pages that may be shared
    num_keyed: int = 0

    @property
    def known_tokens(self) -> list[int]:
        """Tokens to prefill: the prompt, and all but the last emitted one (that one is the pending token)."""
        return [*self.request.prompt, *self.tokens[:-1]]

    def take_prompt_logprobs(self, start: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Those of the prompt's tokens from position `start` on; the ones known from before a preemption stay."""
        num_known = len(self.prompt_logprobs) + 1 - start
        if logprobs and num_known < 0:
            raise InvariantError(f"{self.request.request_id}: log-probabilities of its prompt go missing at {start}")
        self.prompt_logprobs.extend(logprobs[num_known:])


@dataclass(frozen=True)
class Progress:
    """What one engine step brought a request: new tokens, and at the end why it ended."""

    request_id: str
    new_tokens: tuple[int, ...]
    state: RequestState
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
