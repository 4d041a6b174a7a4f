"""Relaxed acceptance: the definition against a loop, and the thinking part from the text alone."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.acceptance import relaxed
from mtp_jax.acceptance.match import Match
from mtp_jax.acceptance.relaxed import Relaxed
from mtp_jax.core.config import EngineConfig, SamplingParams, SpeculativeConfig
from mtp_jax.core.types import Accepted, Drafts, SlotView
from mtp_jax.engine.admission import problem_with
from mtp_jax.engine.requests import RequestState
from mtp_jax.engine.vote import LaunchNeeds
from mtp_jax.ops.row_text import texts_of_rows
from mtp_jax.ops.sampling import law_of_head
from mtp_jax.ops.sharding import NO_PARALLEL
from mtp_jax.ops.thinking import is_thinking
from mtp_jax.testing.driving import Action, Event, Plan, run_plan
from mtp_jax.testing.engines import restart, toy_engine
from mtp_jax.testing.oracle import filtered_logits, log_softmax, plain_drafts, plain_token
from mtp_jax.testing.rows import sampling_rows, slot_view
from mtp_jax.testing.toy_family import ToyFamily
from tests.laws.support import request

VOCAB, BEGIN, END, CAPACITY = 6, 1, 2, 12
TOPK, DELTA = 3, 0.25


def thinks(text: Sequence[int]) -> bool:
    """By the definition: the last mark is a begin mark."""
    marks = [token for token in text if token in (BEGIN, END)]
    return bool(marks) and marks[-1] == BEGIN


def stands(logits_V: np.ndarray, params: SamplingParams, draft: int, topk: int = TOPK, delta: float = DELTA) -> bool:
    """By the definition: among the topk likeliest, and at most delta below the best."""
    law_V = filtered_logits(logits_V, params) if params.temperature > 0 else logits_V
    with np.errstate(invalid="ignore"):
        probs_V = np.exp(log_softmax(law_V))
    best_first = np.argsort(-probs_V, kind="stable")[:topk]
    return draft in best_first and probs_V[draft] >= probs_V.max() - delta and probs_V[draft] > 0


def slots_with(texts: Sequence[Sequence[int]], params: SamplingParams, num_drafts: int) -> SlotView:
    history = np.zeros((len(texts), CAPACITY), np.int32)
    for row, text in zip(history, texts, strict=True):
        row[: len(text)] = text
        row[len(text) :] = BEGIN  # what lies past the text means nothing
    return slot_view(
        sampling_rows(*[params] * len(texts)),
        vocab_size=VOCAB,
        draft_len=num_drafts,
        committed_len=[len(text) - 1 for text in texts],
        history_BS=jnp.array(history),
    )


@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=CAPACITY).map(tuple), min_size=4, max_size=4),
    drafts=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=4, max_size=4),
)
def test_the_last_mark_before_a_row_says_whether_it_thinks(
    texts: list[tuple[int, ...]], drafts: list[list[int]]
) -> None:
    slots = slots_with(texts, SamplingParams(temperature=0, thinking_token_ids=(BEGIN, END)), 2)
    found = np.asarray(_thinking(slots, Drafts(jnp.array(drafts, jnp.int32))))
    for slot, (text, more) in enumerate(zip(texts, drafts, strict=True)):
        assert found[slot].tolist() == [thinks([*text, *more[:row]]) for row in range(3)]


@jax.jit
def _thinking(slots: SlotView, drafts: Drafts) -> jax.Array:
    return is_thinking(texts_of_rows(slots, drafts), slots.sampling.thinking_ids_B2)


@functools.cache
def _jitted(rule: Any) -> Any:
    return jax.jit(rule.accept, static_argnums=3)


def verdict(rule: Any, drafts: np.ndarray, logits: np.ndarray, slots: SlotView) -> Accepted:
    found = _jitted(rule)(Drafts(jnp.array(drafts, jnp.int32)), jnp.array(logits), slots, NO_PARALLEL)
    return jax.device_get(found)


RULE = Relaxed(TOPK, DELTA)
ALL = Relaxed(10**12, 1.0)
"""Whatever has a probability stands."""
PARAMS = [
    SamplingParams(temperature=0, thinking_token_ids=(BEGIN, END)),
    SamplingParams(temperature=0.7, top_k=2, thinking_token_ids=(BEGIN, END)),
]


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "filtered"])
def test_what_stands_is_what_the_definition_says(params: SamplingParams) -> None:
    """Random logits, drafts and texts; marks among the drafts too; each slot against a loop."""
    rng = np.random.default_rng(0)
    num_slots, num_drafts = 256, 3
    texts = [rng.integers(0, 4, size=rng.integers(1, 6)).tolist() for _ in range(num_slots)]
    logits = rng.normal(size=(num_slots, num_drafts + 1, VOCAB)).astype(np.float32)
    best = np.argsort(-logits[:, :num_drafts], axis=-1)
    pick = rng.choice(VOCAB, p=[0.4, 0.25, 0.2, 0.05, 0.05, 0.05], size=(num_slots, num_drafts))
    drafts = np.take_along_axis(best, pick[..., None], axis=-1)[..., 0]
    slots = slots_with(texts, params, num_drafts)
    found = verdict(RULE, drafts, logits, slots)
    num_relaxed = 0
    for slot, text in enumerate(texts):
        expected: list[int] = []
        for row in range(num_drafts + 1):
            own = int(found.target_tokens_BW[slot, row])
            draft = int(drafts[slot, row]) if row < num_drafts else own
            is_relaxed = thinks([*text, *drafts[slot, :row]]) and stands(logits[slot, row], params, draft)
            num_relaxed += is_relaxed and draft != own and row < num_drafts
            if row == num_drafts or not (draft == own or is_relaxed):
                expected.append(own)
                break
            expected.append(draft)
        assert int(found.num_accepted[slot]) == len(expected) - 1
        assert found.tokens_BE[slot, : len(expected)].tolist() == expected
    assert num_relaxed > 10


@pytest.mark.parametrize(("params", "num_accepted"), [(PARAMS[0], 2), (PARAMS[1], 0)], ids=["greedy", "filtered"])
def test_whatever_stands_a_request_excludes_more(params: SamplingParams, num_accepted: int) -> None:
    """More tokens than there are, however unlikely: all that has a probability, and nothing that top-k left out."""
    logits = np.random.default_rng(2).normal(size=(8, 3, VOCAB)).astype(np.float32)
    unlikeliest = 3 + logits[:, :2, 3:].argmin(axis=-1)  # no mark, and at least two are likelier
    slots = slots_with([[BEGIN]] * 8, params, 2)
    assert verdict(ALL, unlikeliest, logits, slots).num_accepted.tolist() == [num_accepted] * 8


def test_without_marks_it_is_match() -> None:
    """For a request that names none, whatever its text."""
    rng = np.random.default_rng(1)
    logits, drafts = rng.normal(size=(64, 4, VOCAB)).astype(np.float32), rng.integers(0, VOCAB, size=(64, 3))
    slots = slots_with([[BEGIN]] * 64, SamplingParams(temperature=1.0), 3)
    found, match = verdict(RULE, drafts, logits, slots), verdict(Match(), drafts, logits, slots)
    np.testing.assert_array_equal(found.num_accepted, match.num_accepted)
    for slot, length in enumerate(match.num_accepted.tolist()):
        np.testing.assert_array_equal(found.tokens_BE[slot, : length + 1], match.tokens_BE[slot, : length + 1])


@pytest.mark.parametrize(
    ("temperature", "prompt", "is_looked_at"),
    [(0.0, [3, BEGIN, END], False), (0.0, [3, BEGIN], True), (0.7, [3], True)],
    ids=["greedy, none thinks", "greedy, thinking", "sampled"],
)
def test_laws_are_looked_at_only_where_somebody_needs_them(
    monkeypatch: pytest.MonkeyPatch, temperature: float, prompt: list[int], is_looked_at: bool
) -> None:
    """Counted while it runs, not while it is traced."""
    looks: list[None] = []

    def counted(*arguments: Any) -> jax.Array:
        jax.debug.callback(lambda: looks.append(None))
        return law_of_head(*arguments)

    monkeypatch.setattr(relaxed, "law_of_head", counted)
    params = SamplingParams(temperature=temperature, thinking_token_ids=(BEGIN, END))
    slots = slots_with([prompt] * 2, params, 1)
    logits_BWV, drafts = jnp.zeros((2, 2, VOCAB)), Drafts(jnp.full((2, 1), 3))
    traced_anew = jax.jit(lambda drafts, logits, slots: RULE.accept(drafts, logits, slots, NO_PARALLEL))
    traced_anew(drafts, logits_BWV, slots)
    jax.effects_barrier()
    assert bool(looks) == is_looked_at


def test_shards_agree_on_laws_for_who_may_think() -> None:
    """Branches with collectives must be taken alike: none may follow what one shard alone knows."""
    assert LaunchNeeds.of(SamplingParams(temperature=0, thinking_token_ids=(BEGIN, END))).whole_logits
    assert not LaunchNeeds.of(SamplingParams(temperature=0)).whole_logits


# ---- through an engine: prompts in chunks, preemption

FAMILY = ToyFamily(draft_hit_percent=30)
ENGINE = functools.partial(
    toy_engine,
    FAMILY,
    max_draft_len=2,
    max_num_seqs=1,
    prefill_chunk=5,
    acceptance="relaxed",
    relaxed_topk=20,
    relaxed_delta=0.6,
)


def check_by_definition(state: RequestState) -> int:
    """Every step of a request against the text before it; how many drafts stood that are not the target's own."""
    one, text = state.request, [*state.request.prompt, *state.tokens]
    num_relaxed = 0
    for record in state.records:
        known = text[: record.committed_len_before + 1]
        assert record.drafts == plain_drafts(FAMILY.plain_draft_logits, one, known, len(record.drafts))
        emitted: list[int] = []
        for draft in (*record.drafts, None):
            before = [*known, *emitted]
            logits_V = FAMILY.plain_logits(before)
            own = plain_token(logits_V, one, before)
            is_relaxed = draft is not None and thinks(before) and stands(logits_V, one.params, draft, 20, 0.6)
            if draft is None or not (draft == own or is_relaxed):
                emitted.append(own)
                break
            num_relaxed += draft != own
            emitted.append(draft)
        assert record.emitted == tuple(emitted[: len(record.emitted)])
        assert len(record.emitted) == len(emitted) or record is state.records[-1]
    return num_relaxed


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_thinking_part_survives_chunks_and_preemption(temperature: float) -> None:
    """A begin mark in the first of three chunks; one with an end mark in a later chunk; marks that the model writes."""
    prompts = [(BEGIN, *range(3, 15)), (BEGIN, 5, 6, 7, 8, 9, END, 4, 4, 4, 3), (7, 7, 7, 7, 7, 7, BEGIN)]
    num_relaxed = []
    for prompt in prompts:
        one = request("a", prompt, temperature=temperature, max_tokens=24, thinking_token_ids=(BEGIN, END))
        for step in (None, 4, 6):
            plan = Plan() if step is None else Plan(events=(Event(step, Action.PREEMPT, 0),))
            state = run_plan(restart(ENGINE()), [one], plan).finished["a"].state
            assert state.metrics.num_preemptions == (step is not None)
            num_relaxed.append(check_by_definition(state))
    assert sum(num_relaxed) > 5


def test_a_relaxed_configuration_is_marked_lossy() -> None:
    assert SpeculativeConfig(acceptance="relaxed").is_lossy


def test_thinking_tokens_where_nothing_is_relaxed_are_refused() -> None:
    one = request("a", (3, 4), thinking_token_ids=(BEGIN, END))
    problem = problem_with(one, EngineConfig(max_model_len=16), vocab_size=29)
    assert problem == "thinking_token_ids goes with acceptance=\"relaxed\", and this engine has 'match'; leave it out."
    lossy = EngineConfig(max_model_len=16, speculative=SpeculativeConfig(acceptance="relaxed"))
    assert problem_with(one, lossy, vocab_size=29) is None
