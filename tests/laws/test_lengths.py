"""Law: the device owns the lengths; a rejection that moves the boundary back over a page edge leaves nothing behind."""

import random
from collections.abc import Callable

import pytest

from mtp_jax.engine.engine import Engine
from mtp_jax.proposers.from_text import FromText
from mtp_jax.testing.driving import run_plan
from mtp_jax.testing.engines import poison, restart
from mtp_jax.testing.oracle import plain_token
from mtp_jax.testing.policies import ScriptedDraftLen
from tests.laws.support import ENGINES, PAGES_OF_1, PAGES_OF_16, PAGES_OF_64, assert_plain, request, toy


def prompt_with(engine: Engine, *, length: int, num_right: int) -> tuple[int, ...]:
    """A prompt of that length after which exactly `num_right` drafts of the first decode step are right."""
    family = toy(engine)
    drawn = random.Random(length * 10 + num_right)
    while True:
        text = [drawn.randrange(family.vocab_size) for _ in range(length)]
        prompt = tuple(text)
        greedy = request("a", prompt, temperature=0.0)
        hits = []
        for _ in range(num_right + 1):
            text.append(plain_token(family.plain_logits(text), greedy, text))
            hits.append(family.plain_is_hit(text))
        if hits == [True] * num_right + [False]:
            return prompt


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_b10_the_next_step_attends_what_was_kept(depth: int) -> None:
    """P = 5, w = 4, one token emitted: the next step sees 6 positions, not 9, though the host may still think 9."""
    engine = PAGES_OF_16()
    one = request("a", prompt_with(engine, length=5, num_right=0), temperature=0.0, max_tokens=12)
    running = restart(engine, readback_depth=depth)
    poison(running)
    run = run_plan(running, [one])
    assert_plain(running, [one], run)
    before = [record.committed_len_before for record in run.finished["a"].state.records]
    assert before[:2] == [5, 6]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_b10_cached_31_and_62_minus_the_rejected_are_28_and_61(depth: int) -> None:
    engine = PAGES_OF_16()
    prompts = (prompt_with(engine, length=27, num_right=0), prompt_with(engine, length=58, num_right=2))
    requests = [request(str(i), prompt, temperature=0.0, max_tokens=10) for i, prompt in enumerate(prompts)]
    running = restart(engine, readback_depth=depth)
    poison(running)
    run = run_plan(running, requests)
    assert_plain(running, requests, run)
    for one, cached, rejected, kept in zip(requests, (31, 62), (3, 1), (28, 61), strict=True):
        first, second = run.finished[one.request_id].state.records[:2]
        assert first.committed_len_before + len(first.target_tokens) == cached
        assert len(first.drafts) - first.num_accepted == rejected
        assert (first.committed_len_after, second.committed_len_before) == (kept, kept)
        assert second.committed_len_before + len(second.target_tokens) == kept + 4


@pytest.mark.parametrize(("cached", "kept"), [(31, 28), (32, 31), (64, 61), (16, 13), (17, 16), (65, 64)])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("build", [PAGES_OF_1, PAGES_OF_16, PAGES_OF_64], ids=["1", "16", "64"])
def test_b11_rewinds_over_a_page_edge(build: Callable[[], Engine], cached: int, kept: int, depth: int) -> None:
    """All drafts rejected: the boundary goes back from `cached` to `kept`. Every unwritten position is poison."""
    engine = build()
    draft_len = cached - kept
    one = request("a", prompt_with(engine, length=kept - 1, num_right=0), temperature=0.0, max_tokens=14)
    running = restart(engine, readback_depth=depth, policy=ScriptedDraftLen((draft_len, 3)))
    poison(running)
    run = run_plan(running, [one])
    assert_plain(running, [one], run)
    first, second = run.finished["a"].state.records[:2]
    assert (first.committed_len_after, first.num_accepted) == (kept, 0)
    assert second.committed_len_before == kept


@pytest.mark.parametrize("draft_len", range(4))
def test_bug_b82_pages_cover_what_is_written(draft_len: int) -> None:
    """Every prompt length around three page edges, every K; `check_trace` compares pages and writes."""
    engine = PAGES_OF_16()
    requests = [
        request(str(length), tuple(range(1, length % 28 + 2)) * 2, temperature=0.0, max_tokens=6)
        for length in range(1, 26)
    ]
    running = restart(engine, policy=ScriptedDraftLen((draft_len,)))
    poison(running)
    assert_plain(running, requests, run_plan(running, requests))


@pytest.mark.parametrize("build", ENGINES.values(), ids=list(ENGINES))
def test_bug_b118_drafts_do_not_depend_on_the_chunks(build: Callable[[], Engine]) -> None:
    """Prompts of 1 to 38 tokens, in chunks of 16, 5, 3 and 1: the first drafts see the prompt's own tokens."""
    engine = build()
    requests = [
        request(str(n), tuple(i * i % engine.family.vocab_size for i in range(n)), temperature=0.0, max_tokens=3)
        for n in range(1, 39)
    ]
    running = restart(engine)
    poison(running)
    run = run_plan(running, requests)
    assert_plain(running, requests, run)
    if not isinstance(engine.program.proposer, FromText):  # lookup drafts nothing where the last token is new
        assert all(run.finished[one.request_id].state.records[0].drafts for one in requests[:30])
