"""Hypothesis strategies: prompts, sampling parameters, requests near their limits, draft-length schedules, plans.

Needs `hypothesis` (in the `test` extra); nothing else in `mtp_jax.testing` does, `host_model` apart.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from mtp_jax.core.config import SamplingParams
from mtp_jax.engine.requests import Request
from mtp_jax.policies.api import StepStats
from mtp_jax.testing.driving import Action, Event, Plan
from mtp_jax.testing.policies import ScriptedDraftLen


def prompts(vocab_size: int, *, min_len: int = 1, max_len: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Token ids; short ones first, so that a failure shrinks to a short prompt."""
    return st.lists(st.integers(0, vocab_size - 1), min_size=min_len, max_size=max_len).map(tuple)


@st.composite
def prompts_near_limit(draw: st.DrawFn, vocab_size: int, *, max_model_len: int, distance: int) -> tuple[int, ...]:
    """Token ids whose number is within `distance` of the longest prompt that is served, `max_model_len - 1`.

    Drawn as a short pattern that is repeated: long enough, and still quick to draw.
    """
    length = max_model_len - 1 - draw(st.integers(0, distance))
    pattern = draw(prompts(vocab_size, max_len=5))
    return tuple(pattern[i % len(pattern)] for i in range(max(length, 1)))


@st.composite
def sampling_params(
    draw: st.DrawFn, vocab_size: int, *, max_tokens: int, num_stop_ids: int = 2, temperatures: Sequence[float] = ()
) -> SamplingParams:
    """Greedy and sampled, with and without filters, stop ids and edits. `temperatures` restricts the choice.

    About one in three edits logits: with penalties (of few binary digits, so that no order of rounding matters),
    biases, bad words or tokens to write at least. Two in five want log-probabilities.
    """
    temperature = draw(st.sampled_from(tuple(temperatures) or (0.0, 0.3, 1.0, 2.5)))
    nothing = st.just(dict[str, Any]())
    edits = draw(st.one_of(nothing, nothing, logit_edits(vocab_size, max_min_tokens=max_tokens)))
    max_tokens = draw(st.integers(max(1, edits.get("min_tokens", 0)), max_tokens))
    return SamplingParams(
        **edits,
        temperature=temperature,
        min_p=draw(st.sampled_from((0.0, 0.0, 0.02, 0.4, 1.0))),
        top_k=draw(st.sampled_from((0, 0, 1, 2, 5, vocab_size, 10 * vocab_size))),
        top_p=draw(st.sampled_from((1.0, 1.0, 0.3, 0.77, 0.999))),
        max_tokens=max_tokens,
        logprobs=draw(st.sampled_from((None, None, None, 0, 2))),
        stop_token_ids=draw(st.lists(st.integers(0, vocab_size - 1), max_size=num_stop_ids).map(tuple)),
        ignore_eos=draw(st.booleans()),
    )


def logit_edits(vocab_size: int, *, max_min_tokens: int) -> st.SearchStrategy[dict[str, Any]]:
    """Parameters that edit logits, each there or not. Never do they ban every token."""
    tokens = st.integers(0, vocab_size - 1)
    words = st.lists(tokens, min_size=1, max_size=3).map(tuple)
    return st.fixed_dictionaries(
        {},
        optional={
            "presence_penalty": st.sampled_from((0.5, 2.0, -1.0)),
            "frequency_penalty": st.sampled_from((0.25, 1.5, -0.5)),
            "repetition_penalty": st.sampled_from((1.25, 2.0, 0.5)),
            "logit_bias": st.dictionaries(tokens, st.sampled_from((-100.0, -2.0, 3.0, 6.0)), max_size=4),
            "bad_words": st.lists(words, max_size=max(vocab_size // 2 - 3, 0)).map(tuple),
            "min_tokens": st.integers(0, max_min_tokens),
        },
    )


@st.composite
def requests(
    draw: st.DrawFn,
    vocab_size: int,
    *,
    max_model_len: int,
    max_tokens: int = 24,
    num_stop_ids: int = 2,
    temperatures: Sequence[float] = (),
    request_id: str = "0",
) -> Request:
    """One request that an engine of `max_model_len` serves; about one in three runs into its limit."""
    near = prompts_near_limit(vocab_size, max_model_len=max_model_len, distance=9)
    far = prompts(vocab_size, max_len=max(1, min(24, max_model_len - 1)))
    params = sampling_params(vocab_size, max_tokens=max_tokens, num_stop_ids=num_stop_ids, temperatures=temperatures)
    return Request(
        request_id=request_id,
        prompt=draw(st.one_of(far, far, near)),
        params=draw(params),
        seed=draw(st.sampled_from((0, 1, 7, 2**32, 2**64 - 1))),
        eos_token_ids=draw(st.sampled_from(((), (3,)))),
        wants_trace=True,
    )


@st.composite
def batches(
    draw: st.DrawFn, vocab_size: int, *, max_model_len: int, min_size: int = 1, max_size: int = 5, max_tokens: int = 24
) -> tuple[Request, ...]:
    """Several requests with ids "0", "1", ...; some prompts begin as an earlier one does, for some way or all of it."""
    size = draw(st.integers(min_size, max_size))
    batch: list[Request] = []
    for index in range(size):
        one = draw(requests(vocab_size, max_model_len=max_model_len, max_tokens=max_tokens, request_id=str(index)))
        if batch and draw(st.booleans()):
            earlier = draw(st.sampled_from(batch)).prompt
            beginning = earlier[: draw(st.integers(0, len(earlier)))]
            one = replace(one, prompt=(*beginning, *one.prompt)[: max_model_len - 1])
        batch.append(one)
    return tuple(batch)


def draft_schedules(max_draft_len: int, *, max_size: int = 24) -> st.SearchStrategy[ScriptedDraftLen]:
    """A draft length for every decode step, zeros and jumps included."""
    wishes = st.lists(st.integers(0, max_draft_len), min_size=1, max_size=max_size)
    return wishes.map(lambda lengths: ScriptedDraftLen(tuple(lengths)))


def wishes_per_shard(
    num_shards: int, max_draft_len: int, *, max_size: int = 6
) -> st.SearchStrategy[tuple[ScriptedDraftLen, ...]]:
    """A schedule of its own for each data shard, so that their wishes part."""
    return st.tuples(*[draft_schedules(max_draft_len, max_size=max_size)] * num_shards)


@st.composite
def shards_of_processes(draw: st.DrawFn, *, max_processes: int = 4, max_shards: int = 2) -> tuple[int, ...]:
    """How many data shards each process of a mesh schedules."""
    return tuple(draw(st.lists(st.integers(1, max_shards), min_size=1, max_size=max_processes)))


def acceptance_masks(draft_len: int) -> st.SearchStrategy[tuple[bool, ...]]:
    """Which of `draft_len` drafts are right, prefix or not."""
    return st.lists(st.booleans(), min_size=draft_len, max_size=draft_len).map(tuple)


@st.composite
def plans(draw: st.DrawFn, num_requests: int, *, max_step: int = 20, max_events: int = 4) -> Plan:
    """Arrivals at any step; preemptions and cancellations at any point, of any request."""
    arrivals = draw(st.lists(st.integers(0, max_step // 2), max_size=num_requests))
    event = st.builds(
        Event, st.integers(0, max_step), st.sampled_from(tuple(Action)), st.integers(0, max(num_requests - 1, 0))
    )
    return Plan(tuple(arrivals), tuple(draw(st.lists(event, max_size=max_events))))


@st.composite
def step_stats(draw: st.DrawFn, max_draft_len: int, *, slot_buckets: Sequence[int] = (1, 8)) -> StepStats:
    """What a policy learns of a finished step: counts fall with the position, no more accepted than drafted."""
    draft_len, bucket = draw(st.integers(0, max_draft_len)), draw(st.sampled_from(slot_buckets))
    drafted = tuple(sorted(draw(st.lists(st.integers(1, bucket), max_size=draft_len)), reverse=True))
    accepted, most = list[int](), bucket
    for count in drafted:
        most = draw(st.integers(0, min(most, count)))
        accepted.append(most)
    return StepStats(bucket, draft_len, drafted, tuple(accepted))
