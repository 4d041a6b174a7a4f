"""Law: log-probabilities of a prompt are those of the model after each of its beginnings, however it is prefilled."""

import numpy as np
import pytest

from mtp_jax.engine.engine import Engine
from mtp_jax.engine.requests import Request, RequestState
from mtp_jax.testing.driving import Action, Event, Plan, run_plan
from mtp_jax.testing.engines import restart
from mtp_jax.testing.oracle import log_softmax
from tests.laws.support import PAGES_OF_16, THREE_SLOTS, assert_plain, request, toy

PROMPT = tuple((7 * i + i * i) % 29 for i in range(35))


def assert_right(engine: Engine, state: RequestState) -> None:
    prompt = state.request.prompt
    assert [entry.token for entry in state.prompt_logprobs] == list(prompt[1:])
    for position, entry in enumerate(state.prompt_logprobs, start=1):
        expected_V = log_softmax(toy(engine).plain_logits(prompt[:position]))
        assert entry.logprob == pytest.approx(expected_V[entry.token], abs=1e-5)
        assert entry.rank == 1 + np.count_nonzero(expected_V > expected_V[entry.token])
        best = sorted(expected_V, reverse=True)[: len(entry.top)]
        assert [logprob for _, logprob in entry.top] == pytest.approx(best, abs=1e-5)


def asking(request_id: str, prompt: tuple[int, ...], *, temperature: float) -> Request:
    return request(request_id, prompt, max_tokens=6, prompt_logprobs=2, temperature=temperature)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_prompt_token_is_scored_once(depth: int) -> None:
    """Prompts of one token, within a chunk, at its edge and over several; a neighbour who did not ask gets none."""
    engine = restart(THREE_SLOTS(), readback_depth=depth)
    batch = [asking(str(n), PROMPT[:n], temperature=float(n % 2)) for n in (1, 2, 16, 17, 33, 35)]
    silent = request("silent", PROMPT[:20], temperature=0.0, max_tokens=6)
    run = run_plan(engine, [silent, *batch])
    assert_plain(engine, [silent, *batch], run)
    assert run.finished["silent"].state.prompt_logprobs == []
    for one in batch:
        assert_right(engine, run.finished[one.request_id].state)


def test_the_last_row_of_a_chunk_scores_the_next_chunks_first_token() -> None:
    """Chunks of three: the score of each chunk's last row is of the next chunk's first token."""
    engine = restart(PAGES_OF_16())
    batch = [asking(str(n), PROMPT[:n], temperature=0.0) for n in (3, 4, 11)]
    run = run_plan(engine, batch)
    for one in batch:
        assert_right(engine, run.finished[one.request_id].state)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_preemption_repeats_no_score_and_loses_none(depth: int) -> None:
    """Between chunks, after the last one, and late in the text."""
    engine = THREE_SLOTS()
    for step in (1, 2, 3, 4, 6):
        plan = Plan(events=(Event(step, Action.PREEMPT, 0), Event(step + 2, Action.PREEMPT, 0)))
        running = restart(engine, readback_depth=depth)
        one = asking("a", PROMPT, temperature=0.0)
        run = run_plan(running, [one], plan)
        assert_right(engine, run.finished["a"].state)
        assert_plain(running, [one], run)
