"""Law: nothing past the limit or after a stop is ever emitted, and the count is exact."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.core.config import FinishReason
from mtp_jax.engine.engine import Engine
from mtp_jax.testing.driving import run_plan
from mtp_jax.testing.engines import poison, restart, written_positions
from mtp_jax.testing.oracle import plain_decode
from mtp_jax.testing.policies import ScriptedDraftLen
from mtp_jax.testing.strategies import prompts
from tests.laws.support import ENGINES, PAGES_OF_1, THREE_SLOTS, assert_plain, plain, request, toy

KMAX = 3


@pytest.fixture(params=(THREE_SLOTS, PAGES_OF_1), ids=("pages of 4", "pages of 1"), scope="module")
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.param()


@pytest.mark.parametrize("near_limit", ["row_cap", "group_zero"])
@pytest.mark.parametrize("draft_len", range(KMAX + 1))
def test_b01_zero_draft_near_the_limit(engine: Engine, draft_len: int, near_limit: str) -> None:
    longest = engine.config.max_model_len
    for distance, depth in itertools.product(range(1, KMAX + 3), range(3)):
        prompt = tuple(position * 11 % 29 for position in range(longest - distance))
        one = request("a", prompt, temperature=0.0, max_tokens=64)
        running = restart(engine, policy=ScriptedDraftLen((draft_len,)), readback_depth=depth, near_limit=near_limit)
        poison(running)
        run = run_plan(running, [one])
        assert_plain(running, [one], run)
        last = run.finished["a"]
        assert last.finish_reason is FinishReason.LENGTH
        assert len(last.state.tokens) == distance
        if near_limit == "group_zero" and distance <= KMAX:
            assert set(last.state.metrics.draft_lens) <= {0}
        # A fresh pool gives its pages out in order: the request's positions are those of pages 1, 2, ...
        target, drafter = written_positions(running, range(1, engine.config.num_pages + 1))
        assert target == set(range(longest - 1))
        assert drafter < target


@pytest.mark.parametrize("draft_len", range(KMAX + 1))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bug_b28_exactly_max_tokens_are_delivered(engine: Engine, draft_len: int, temperature: float) -> None:
    running = restart(engine, policy=ScriptedDraftLen((draft_len,)))
    sweep = [
        request(str(n), (4, 2, 17), temperature=temperature, max_tokens=n) for n in range(1, 4 * (draft_len + 1) + 1)
    ]
    run = run_plan(running, sweep)
    assert_plain(running, sweep, run)
    for one in sweep:
        last = run.finished[one.request_id]
        assert (len(last.state.tokens), last.finish_reason) == (one.params.max_tokens, FinishReason.LENGTH)


@pytest.mark.parametrize("position", range(1, 9))
@pytest.mark.parametrize("stop_is_eos", [False, True])
def test_b18_an_accepted_stop_cuts_the_run(engine: Engine, position: int, stop_is_eos: bool) -> None:
    """Token `position` of the text is the stop: all places within a run of accepted drafts are met."""
    prompt = prompt_whose_drafts_are_right(engine, count=8)
    text = plain(engine, request("a", prompt, temperature=0.0, max_tokens=16)).tokens
    stop = text[position]
    cut = text.index(stop)
    ids = {"eos": (stop,)} if stop_is_eos else {"stop_token_ids": (stop, 28)}
    one = request("a", prompt, temperature=0.0, max_tokens=16, **ids)  # type: ignore[arg-type]
    running = restart(engine)
    last = run_plan(running, [one]).finished["a"]
    assert tuple(last.state.tokens) == text[: cut + 1]
    assert last.finish_reason is FinishReason.STOP
    assert last.stop_reason == (None if stop_is_eos else stop)
    metrics = last.state.metrics
    assert metrics.num_accepted_tokens <= len(last.state.tokens) - 1
    assert sum(len(record.emitted) for record in last.state.records) == cut


@pytest.mark.parametrize("build", ENGINES.values(), ids=ENGINES)
def test_b18_a_stop_cuts_the_run_whoever_drafts(build: Callable[[], Engine]) -> None:
    """Each token of a text as its stop; drafts past it are not counted as accepted."""
    engine = build()
    text = plain(engine, request("free", (1, 1, 2, 3), temperature=0.0, max_tokens=16)).tokens
    for stop in dict.fromkeys(text):
        one = request("a", (1, 1, 2, 3), temperature=0.0, max_tokens=16, stop_token_ids=(stop,))
        running = restart(engine)
        run = run_plan(running, [one])
        assert_plain(running, [one], run)
        state = run.finished["a"].state
        assert state.tokens[-1] == stop
        accepted = [record.num_accepted for record in state.records]
        assert state.metrics.num_accepted_tokens == sum(accepted)
        assert sum(len(record.emitted) for record in state.records) == len(state.tokens) - 1


def test_bug_b25_a_stop_is_seen_at_every_place_of_a_run(engine: Engine) -> None:
    """Not only at its last token: with K = 3 all accepted, the stop comes first, second, third and fourth."""
    prompt = prompt_whose_drafts_are_right(engine, count=8)
    text = plain(engine, request("a", prompt, temperature=0.0, max_tokens=16)).tokens
    places = set()
    for position in range(1, 5):
        one = request("a", prompt, temperature=0.0, max_tokens=16, stop_token_ids=(text[position],))
        last = run_plan(restart(engine), [one]).finished["a"]
        places.add(len(last.state.records[-1].emitted))
        assert last.state.tokens[-1] == text[position]
    assert places == {1, 2, 3, 4}


def prompt_whose_drafts_are_right(engine: Engine, count: int) -> tuple[int, ...]:
    """A prompt after whose first token `count` drafts in a row are right, and whose text repeats no token till then."""
    family = toy(engine)
    for first, second in itertools.product(range(29), repeat=2):
        one = request("a", (first, second, 5), temperature=0.0, max_tokens=count + 1)
        tokens = plain_decode(family.plain_logits, one, max_model_len=64).tokens
        texts = [(*one.prompt, *tokens[:n]) for n in range(1, count + 1)]
        if len(set(tokens)) == len(tokens) and all(family.plain_is_hit(text) for text in texts):
            return one.prompt
    raise LookupError("no such prompt")


@given(prompt=prompts(29, max_len=40), max_tokens=st.integers(1, 60), depth=st.integers(0, 2))
def test_bug_b152_no_draft_for_a_row_that_needs_one_token_more(
    prompt: tuple[int, ...], max_tokens: int, depth: int
) -> None:
    running = restart(THREE_SLOTS(), readback_depth=depth)
    one = request("a", prompt, temperature=0.0, max_tokens=max_tokens)
    last = run_plan(running, [one]).finished["a"]
    for record in last.state.records:
        assert len(record.drafts) <= last.state.limit - record.committed_len_before - 1
    if depth == 0 and last.state.records and len(last.state.records[-1].emitted) == 1:
        final = last.state.records[-1]
        if final.committed_len_before + 1 == last.state.limit:
            assert final.draft_len == 0
