"""Law: pages of a prompt that others filled change neither tokens nor drafts; what is shared was computed once."""

from collections.abc import Callable

import pytest

from mtp_jax.engine.engine import Engine
from mtp_jax.engine.prefixes import PrefixPages
from mtp_jax.engine.requests import Request
from mtp_jax.policies.fixed import FixedDraftLen
from mtp_jax.testing.driving import Action, Event, Plan, Run, run_plan
from mtp_jax.testing.engines import poison, restart
from tests.laws.support import LOOKUP, PAGES_OF_16, THREE_SLOTS, TREE, assert_plain, request

BEGINNING = (3, 1, 2, 0, 3, 2, 1, 1, 0, 2, 3, 3, 1, 0, 2, 2, 1, 3, 0, 1)
ENGINES = {"one MTP layer": THREE_SLOTS, "three MTP layers": PAGES_OF_16, "a tree": TREE, "prompt lookup": LOOKUP}


def serve(engine: Engine, requests: list[Request], plan: Plan = Plan(), **books: object) -> Run:  # noqa: B008  frozen
    engine = restart(engine, policy=FixedDraftLen(), **books)  # type: ignore[arg-type]
    poison(engine)
    return run_plan(engine, requests, plan)


def num_cached(run: Run) -> list[int]:
    return [run.finished[key].state.metrics.num_cached_tokens for key in sorted(run.finished)]


def requests_that_part(engine: Engine) -> list[Request]:
    """Within a page, right behind one (where a drafter that looks ahead has looked already), and not at all."""
    page_size = engine.config.cache.page_size
    beginning = BEGINNING[: page_size + 3]
    prompts = [beginning, (*beginning[:page_size], 1 - beginning[page_size] % 2, 0, 1), beginning]
    return [
        request(str(i), prompt, seed=i, temperature=0.7 * (i % 2), max_tokens=8) for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("build", ENGINES.values(), ids=list(ENGINES))
def test_prompts_that_begin_alike_share_pages_and_nothing_else_changes(build: Callable[[], Engine]) -> None:
    engine = build()
    requests, page_size = requests_that_part(engine), engine.config.cache.page_size
    run = serve(engine, requests)
    assert_plain(engine, requests, run)
    assert num_cached(run) == [0, 0 if engine.program.proposer.lookahead else page_size, page_size]
    without = serve(engine, requests, prefix_caching=False)
    assert_plain(engine, requests, without)
    assert num_cached(without) == [0, 0, 0]


def test_drafts_tell_when_a_page_is_found_without_what_the_drafter_saw_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys_of = PrefixPages.keys

    def keys(self: PrefixPages, tokens: list[int]) -> tuple[bytes, ...]:
        self._lookahead = 0
        return keys_of(self, tokens)

    monkeypatch.setattr(PrefixPages, "keys", keys)
    engine = THREE_SLOTS()
    requests = requests_that_part(engine)
    run = serve(engine, requests)
    assert num_cached(run) == [0, 4, 4]
    with pytest.raises(AssertionError):
        assert_plain(engine, requests, run)


def test_bug_b85_what_was_only_drafted_is_nobodys_prefix() -> None:
    """A prompt that goes on as a rejected draft did, and one that goes on as the text did: both share the prompt's page
    alone.
    """
    engine = THREE_SLOTS()
    first = request("0", BEGINNING[:7], temperature=0.0, max_tokens=16)
    state = serve(engine, [first]).finished["0"].state
    record = next(record for record in state.records if record.num_accepted < len(record.drafts))
    text = (*first.prompt, *state.tokens)
    known = text[: record.committed_len_before + 1 + record.num_accepted]
    drafted = (*known, *record.drafts[record.num_accepted :], *range(6))
    later = [request("1", drafted, max_tokens=6), request("2", text[:16], max_tokens=6)]
    run = serve(engine, [first, *later], Plan(arrivals=(0, 30, 30)))
    assert_plain(engine, [first, *later], run)
    assert num_cached(run) == [0, 4, 4]


def test_requests_seated_together_share_what_the_first_of_them_has_launched() -> None:
    engine = THREE_SLOTS()
    requests = [request(str(i), (*BEGINNING, i), max_tokens=4) for i in range(3)]
    run = serve(engine, requests)
    assert_plain(engine, requests, run)
    assert num_cached(run) == [0, 16, 16]  # of 21 tokens in pages of 4, one looked ahead to


def test_a_request_that_was_preempted_finds_its_own_prompt_again() -> None:
    engine = THREE_SLOTS()
    requests = [request("0", BEGINNING, max_tokens=12)]
    hits: list[int] = []
    plan = Plan(events=(Event(4, Action.PREEMPT, 0),))
    running = restart(engine, policy=FixedDraftLen())
    run = run_plan(running, requests, plan, after_step=lambda one: hits.append(one.group.totals.num_prefix_hits))
    assert_plain(engine, requests, run)
    assert hits[-1] == 16
    assert run.finished["0"].state.metrics.num_preemptions == 1
    assert num_cached(run) == [0]  # no other request filled them


def test_penalties_count_tokens_of_pages_that_others_filled() -> None:
    engine = THREE_SLOTS()
    params = {"max_tokens": 8, "repetition_penalty": 3.0, "bad_words": [[BEGINNING[-1], 5]]}
    requests = [request(str(i), BEGINNING, **params) for i in range(2)]
    run = serve(engine, requests)
    assert_plain(engine, requests, run)
    assert num_cached(run)[1] == 16


def test_a_prompt_whose_tokens_are_scored_is_computed_whole() -> None:
    engine = THREE_SLOTS()
    requests = [request("0", BEGINNING, max_tokens=2), request("1", BEGINNING, max_tokens=2, prompt_logprobs=0)]
    run = serve(engine, requests)
    assert num_cached(run) == [0, 0]
    assert len(run.finished["1"].state.prompt_logprobs) == len(BEGINNING) - 1


def test_pages_that_are_kept_are_free_for_whoever_needs_them() -> None:
    """A pool with room for one request: what the first left is given up page by page, and the rest still serves."""
    engine = THREE_SLOTS()
    long, short = request("0", BEGINNING, max_tokens=4), request("1", BEGINNING[:9], max_tokens=2)
    others = [request(str(i), tuple(range(i, i + 24)), max_tokens=20) for i in range(2, 4)]
    run = serve(engine, [long, others[0], short, others[1]], num_pages=12)
    assert_plain(engine, [long, short, *others], run)
