"""Drafting with an Eagle3 drafter changes no token, and each draft is that of a drafter with no past."""

import functools
from collections.abc import Sequence

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_jax.engine.requests import Request
from mtp_jax.models.api import Weights
from mtp_jax.testing.driving import Action, Event, Plan, Run, run_plan
from mtp_jax.testing.engines import poison, restart, toy_engine, written_positions
from mtp_jax.testing.oracle import PlainResult, plain_decode, plain_drafts
from mtp_jax.testing.policies import ScriptedDraftLen
from mtp_jax.testing.strategies import batches, draft_schedules, plans
from tests.laws.support import request
from tests.models.support import as_row, dense_kv, positions_of, run_target
from tests.models.tiny_eagle3 import DRAFTER_CONFIG, VOCAB_SIZE, tiny_eagle3

KMAX, MAX_LEN = 3, 40
FAMILY = tiny_eagle3()
ENGINE = functools.partial(
    toy_engine, FAMILY, method="eagle3", max_draft_len=KMAX, max_num_seqs=1, max_model_len=MAX_LEN, prefill_chunk=5
)
TREE = functools.partial(
    toy_engine,
    FAMILY,
    method="dynamic_tree",
    tree_topk=2,
    max_draft_len=2,
    max_num_seqs=1,
    max_model_len=MAX_LEN,
)
ON_A_MESH = functools.partial(
    toy_engine, FAMILY, method="eagle3", max_draft_len=1, max_num_seqs=2, max_model_len=MAX_LEN, data=2, model=2
)
REFERENCE = FAMILY.reference(DRAFTER_CONFIG)


@functools.cache
def weights() -> Weights:
    return FAMILY.init_weights(jax.random.key(0), None)


def target_logits(tokens: Sequence[int]) -> np.ndarray:
    """Of a dense pass over the text alone, padded to one length."""
    text = np.zeros(MAX_LEN, np.int32)
    text[: len(tokens)] = tokens
    kv = dense_kv(FAMILY.kv_specs(), 1, MAX_LEN)
    _, logits, _ = run_target(FAMILY, weights(), as_row(text), positions_of(MAX_LEN), kv)
    return np.asarray(logits[0, len(tokens) - 1])


def plain(one: Request) -> PlainResult:
    return plain_decode(target_logits, one, max_model_len=MAX_LEN)


def assert_plain(requests: Sequence[Request], run: Run) -> None:
    for one in requests:
        if one.request_id not in run.cancelled:
            last, expected = run.finished[one.request_id], plain(one)
            assert tuple(last.state.tokens) == expected.tokens
            assert last.finish_reason == expected.finish_reason


@settings(max_examples=max(settings().max_examples // 2, 10))
@given(data=st.data())
def test_tokens_are_those_of_plain_decoding(data: st.DataObject) -> None:
    requests = data.draw(batches(VOCAB_SIZE, max_model_len=MAX_LEN, max_size=3, max_tokens=12))
    running = restart(
        ENGINE(),
        policy=data.draw(draft_schedules(KMAX)),
        readback_depth=data.draw(st.integers(0, 2)),
        near_limit=data.draw(st.sampled_from(("row_cap", "group_zero"))),
    )
    poison(running)
    assert_plain(requests, run_plan(running, requests, data.draw(plans(len(requests)))))


def scratch_drafts(one: Request, known: Sequence[int], num_drafts: int) -> tuple[int, ...]:
    """Greedy, or by the noise that the request's own tokens are drawn with; by a drafter that sees all of it anew."""

    def logits_after(longer: Sequence[int]) -> np.ndarray:
        return REFERENCE.draft_logits(known, longer[len(known) :])

    return plain_drafts(logits_after, one, known, num_drafts)


def assert_drafts_from_scratch(one: Request, run: Run) -> None:
    """Each step's drafts."""
    state = run.finished[one.request_id].state
    text = [*one.prompt, *state.tokens]
    for record in state.records:
        known = text[: record.committed_len_before + 1]
        assert record.drafts == scratch_drafts(one, known, len(record.drafts))


SAMPLED = {"temperature": 0.8, "seed": 3}
CASES = {
    "greedy": {"temperature": 0.0},
    "sampled": SAMPLED,
    "filtered": SAMPLED | {"top_k": 7, "top_p": 0.9},
    "penalised": SAMPLED | {"repetition_penalty": 1.4, "presence_penalty": 0.7, "logit_bias": {4: 1.5, 6: 2.0}},
}


@pytest.mark.parametrize("wishes", [(3,), (3, 0, 0, 0, 3), (1, 3, 0, 2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_b17_b64_drafts_are_those_of_a_drafter_with_no_past(case: str, wishes: tuple[int, ...]) -> None:
    """Whatever lengths came before: so acceptance after zero steps is that of drafting all along."""
    params = dict(CASES[case])
    one = request("a", (5, 1, 4, 1, 5, 9, 2), seed=int(params.pop("seed", 0)), max_tokens=20, **params)
    other = request("b", (8, 3), temperature=1.0, max_tokens=9, seed=1)
    running = restart(ENGINE(), policy=ScriptedDraftLen(wishes))
    poison(running)
    # Preempted once: features and entries of its text are then made anew, in chunks.
    run = run_plan(running, [one, other], Plan(events=(Event(15, Action.PREEMPT, 0),)))
    assert_plain([one, other], run)
    assert_drafts_from_scratch(one, run)
    records = run.finished["a"].state.records
    assert sum(len(record.drafts) for record in records) > 5


def test_drafts_of_flat_laws_are_often_right() -> None:
    """By the noise of the target's ids: two laws of no more in common than their noise agree far above chance."""
    requests = [request(str(i), (i, 2 * i, 7), temperature=1.5, seed=i, max_tokens=24) for i in range(6)]
    running = restart(ENGINE())
    records = [record for last in run_plan(running, requests).finished.values() for record in last.state.records]
    first = [record.num_accepted > 0 for record in records if record.drafts]
    assert len(first) > 60
    assert np.mean(first) > 0.3  # by the noise of draft ids it would be about 1 in 24


def test_b06_a_zero_for_good_clears_the_drafts() -> None:
    one = request("a", (5, 1, 4, 2), temperature=0.0, max_tokens=20)
    running = restart(ENGINE(), policy=ScriptedDraftLen((3, 3, 0)))
    run = run_plan(running, [one])
    assert_plain([one], run)
    state = run.finished["a"].state
    assert state.metrics.draft_lens[:3] == [3, 3, 0]
    assert not any(state.metrics.draft_lens[3:])
    assert state.metrics.num_draft_tokens == sum(len(record.drafts) for record in state.records[:2]) > 0
    assert all(record.drafts == () and len(record.emitted) == 1 for record in state.records[2:])


@pytest.mark.parametrize("wishes", [(3,), (0,), (2, 0, 1)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 12])
def test_b01_pages_are_whole_up_to_the_limit_and_untouched_beyond(num_tokens: int, wishes: tuple[int, ...]) -> None:
    prompt = (5, 1, 4, 2, 2, 3)
    one = request("a", prompt, temperature=0.0, max_tokens=num_tokens)
    running = restart(ENGINE(), policy=ScriptedDraftLen(wishes), num_pages=10)  # as many as the longest text has
    poison(running)
    last = run_plan(running, [one]).finished["a"]
    assert len(last.state.tokens) == num_tokens
    limit = len(prompt) + num_tokens - 1
    *target, drafter = written_positions(running, range(1, 11))
    for layer in target:
        assert layer == set(range(limit))
    # The entry before the pending token is made when a step drafts; the last emitted token needs none.
    assert drafter - set(range(limit)) == set()
    assert set(range(len(prompt) - 1)) <= drafter


@pytest.mark.long
def test_a_tree_over_the_drafter_gives_the_same_tokens_and_keeps_its_first_draft() -> None:
    requests = [request(str(i), (i, 2 * i, 7, 11), temperature=0.7 * i, seed=i, max_tokens=14) for i in range(3)]
    running = restart(TREE(), policy=ScriptedDraftLen((2, 0, 1, 2)))
    poison(running)
    run = run_plan(running, requests)
    assert_plain(requests, run)
    num_accepted = 0
    for one in requests:
        state = run.finished[one.request_id].state
        text = [*one.prompt, *state.tokens]
        for record in state.records:
            known = text[: record.committed_len_before + 1]
            assert record.drafts[:1] == scratch_drafts(one, known, min(len(record.drafts), 1))
            num_accepted += record.num_accepted
    assert num_accepted > 0


@pytest.mark.long
def test_a_mesh_gives_the_same_tokens() -> None:
    requests = [request(str(i), (i, 2 * i, 7, 11), temperature=0.8 * (i % 2), seed=i, max_tokens=9) for i in range(4)]
    running = restart(ON_A_MESH(), policies=[ScriptedDraftLen((1, 0, 1)), ScriptedDraftLen((1,))])
    poison(running)
    run = run_plan(running, requests)
    assert_plain(requests, run)
    for one in requests:
        assert_drafts_from_scratch(one, run)
