"""Laws of sampled decoding: coupled drafts are accepted more often, log-probabilities are the target's."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.engine.engine import Engine
from mtp_jax.testing.driving import Action, Event, Plan, run_plan
from mtp_jax.testing.engines import restart, toy_engine
from mtp_jax.testing.oracle import log_softmax
from mtp_jax.testing.policies import ScriptedDraftLen
from mtp_jax.testing.toy_family import ToyFamily
from tests.laws.support import THREE_SLOTS, TREE, plain, request, toy


def acceptance_at_temperature_one(draft_sampling: str) -> float:
    family = ToyFamily(draft_hit_percent=100, draft_flatness=1.5)
    engine = restart(toy_engine(family, draft_sampling=draft_sampling, max_draft_len=1, max_num_seqs=1))
    batch = [request(str(seed), (seed, 1), temperature=1.0, seed=seed, max_tokens=40) for seed in range(12)]
    run = run_plan(engine, batch)
    for one in batch:
        assert tuple(run.finished[one.request_id].state.tokens) == plain(engine, one).tokens
    totals = engine.scheduler.totals
    return totals.num_accepted_tokens / totals.num_draft_tokens


def test_coupled_drafts_are_accepted_more_often_than_greedy_ones() -> None:
    """The drafter's law differs from the target's; the tokens are plain decoding's in both cases."""
    coupled, greedy = acceptance_at_temperature_one("coupled"), acceptance_at_temperature_one("greedy")
    assert coupled > greedy + 0.1
    assert coupled > 0.5


@pytest.mark.parametrize("build", [THREE_SLOTS, TREE], ids=["chain", "tree"])
@given(
    prompt=st.lists(st.integers(0, 28), min_size=1, max_size=12),
    num_logprobs=st.integers(0, 3),
    temperature=st.sampled_from((0.0, 0.7, 1.5)),
    wishes=st.lists(st.integers(0, 3), min_size=1, max_size=8),
)
def test_bug_b122_logprobs_are_those_of_a_teacher_forced_target(
    build: Callable[[], Engine], prompt: list[int], num_logprobs: int, temperature: float, wishes: list[int]
) -> None:
    """Raw, before temperature and filters; one neighbour asks for none and gets none."""
    engine = restart(build(), policy=ScriptedDraftLen(tuple(wishes)))
    asking = request("asking", prompt, temperature=temperature, top_k=4, seed=3, max_tokens=12, logprobs=num_logprobs)
    silent = request("silent", prompt, temperature=temperature, max_tokens=12)
    run = run_plan(engine, [silent, asking])
    state = run.finished["asking"].state
    assert run.finished["silent"].state.logprobs == []
    assert [entry.token for entry in state.logprobs] == state.tokens
    text = list(prompt)
    for entry in state.logprobs:
        logprobs_V = log_softmax(toy(engine).plain_logits(text))
        # float32 log-softmax of 29 logits below 8 in absolute value: a few units of the last place of 8.
        assert math.isclose(entry.logprob, logprobs_V[entry.token], abs_tol=1e-5)
        assert entry.logprob < 0
        assert entry.rank == 1 + np.count_nonzero(logprobs_V > logprobs_V[entry.token])
        best = sorted(logprobs_V, reverse=True)[: len(entry.top)]
        assert len(entry.top) >= num_logprobs
        assert [logprob for _, logprob in entry.top] == pytest.approx(best, abs=1e-5)
        assert all(math.isclose(logprobs_V[token], logprob, abs_tol=1e-5) for token, logprob in entry.top)
        text.append(entry.token)


def test_logprobs_survive_preemption() -> None:
    """A resumed request keeps those of the tokens it had, and gets no second one for its pending token."""
    one = request("a", (5, 5, 5), temperature=1.0, max_tokens=16, logprobs=2)
    expected = run_plan(restart(THREE_SLOTS()), [one]).finished["a"].state
    for step in range(2, 7):
        plan = Plan(events=(Event(step, Action.PREEMPT, 0),))
        state = run_plan(restart(THREE_SLOTS()), [one], plan).finished["a"].state
        assert state.metrics.num_preemptions == 1
        assert state.tokens == expected.tokens
        assert [entry.token for entry in state.logprobs] == state.tokens
        assert [e.logprob for e in state.logprobs] == pytest.approx([e.logprob for e in expected.logprobs], abs=1e-5)
