"""The last chunk of a prompt draws the first token; a resumed request's is taken as it is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.acceptance.match import Match
from mtp_jax.core.config import CacheConfig, EngineConfig, SamplingParams, SpeculativeConfig
from mtp_jax.core.shapes import PrefillShape
from mtp_jax.core.types import DecodeState, StepOutputs
from mtp_jax.engine.batch import BatchBuilder
from mtp_jax.engine.decisions import LaunchDecision, PrefillDecision
from mtp_jax.engine.requests import Request, RequestState
from mtp_jax.engine.slots import SlotTable
from mtp_jax.ops.placement import Placement
from mtp_jax.proposers.registry import PROPOSERS
from mtp_jax.step.prefill import prefill_step
from mtp_jax.step.program import StepProgram, init_state
from mtp_jax.testing.toy_family import ToyFamily

FAMILY = ToyFamily()
PROMPT = (4, 8, 15, 16, 23)
DRAWN = int(np.argmax(FAMILY.plain_logits(PROMPT)))
CONFIG = EngineConfig(
    max_model_len=16, max_num_seqs=3, cache=CacheConfig(page_size=4), speculative=SpeculativeConfig(), max_logprobs=1
)


@functools.cache
def program() -> StepProgram:
    return StepProgram(
        family=FAMILY,
        proposer=PROPOSERS["mtp_eagle"].build(FAMILY, CONFIG.speculative),
        rule=Match(),
        attention_backend="reference",
        num_stop_ids=CONFIG.max_stop_token_ids,
        list_sizes=CONFIG.list_sizes,
        max_logprobs=CONFIG.max_logprobs,
    )


def batch_builder() -> BatchBuilder:
    return BatchBuilder(CONFIG, Placement())


step = jax.jit(
    lambda state, packed: prefill_step(
        FAMILY.init_weights(jax.random.key(0), None), state, packed, program=program(), shape=PrefillShape(len(PROMPT))
    )
)


def prefill(
    *, num_tokens: int = len(PROMPT), pending_token: int | None = None, max_tokens: int = 8, stops: tuple[int, ...] = ()
) -> tuple[DecodeState, DecodeState, StepOutputs]:
    """The first `num_tokens` of the prompt in slot 1: state before, state after, outputs."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=stops)
    slots = SlotTable(3)
    slots.seat(RequestState(Request("other", (1,), params, 0), limit=9), [5])
    slot = slots.seat(RequestState(Request("a", PROMPT, params, 0), limit=len(PROMPT) + max_tokens - 1), [1, 2])
    slot.pending_token = pending_token
    decision = PrefillDecision(
        number=1,
        shape=PrefillShape(len(PROMPT)),
        slot=1,
        admission=slot.admission,
        start=0,
        num_tokens=num_tokens,
        is_first=True,
        is_last=num_tokens == len(PROMPT),
        wants_logprobs=False,
    )
    state = init_state(program(), CONFIG, jnp.dtype("float32"))
    packed = batch_builder().build(LaunchDecision(1, decision.shape, (decision,)), [slots])
    return state, *step(state, packed)


def test_the_last_chunk_draws_a_token_and_frees_the_slot_for_decoding() -> None:
    _, state, outputs = prefill()
    assert outputs.tokens_BE.tolist() == [[DRAWN]]
    assert (outputs.num_emitted.tolist(), outputs.finished.tolist()) == ([1], [False])
    assert (int(state.committed_len[1]), int(state.pending_token[1])) == (len(PROMPT), DRAWN)
    assert state.finished.tolist() == [True, False, True]


def test_a_resumed_request_keeps_its_pending_token_and_emits_nothing() -> None:
    """Even one that would not be drawn here: what was emitted is not taken back."""
    other = (DRAWN + 1) % FAMILY.vocab_size
    _, state, outputs = prefill(pending_token=other)
    assert int(state.pending_token[1]) == other
    assert outputs.num_emitted.tolist() == [0]
    assert not bool(state.finished[1])


def test_a_chunk_that_is_not_the_last_leaves_the_slot_unready() -> None:
    _, state, outputs = prefill(num_tokens=3)
    assert int(state.committed_len[1]) == 3
    assert bool(state.finished[1])
    assert outputs.num_emitted.tolist() == [0]


@pytest.mark.parametrize("ending", [{"max_tokens": 1}, {"stops": (DRAWN,)}], ids=["length", "stop"])
def test_the_first_token_may_be_the_last(ending: dict) -> None:  # type: ignore[type-arg]
    _, state, outputs = prefill(**ending)
    assert (outputs.num_emitted.tolist(), outputs.finished.tolist()) == ([1], [True])
    assert bool(state.finished[1])


def test_other_slots_are_left_alone() -> None:
    before, state, _ = prefill()
    for name in ("committed_len", "pending_token", "finished"):
        old, new = np.asarray(getattr(before, name)), np.asarray(getattr(state, name))
        assert np.array_equal(old[[0, 2]], new[[0, 2]])
    for old_pages, new_pages in zip(jax.tree.leaves(before.kv), jax.tree.leaves(state.kv), strict=True):
        assert np.array_equal(np.asarray(old_pages)[3:], np.asarray(new_pages)[3:])


def test_an_idle_launch_changes_nothing_but_the_null_page() -> None:
    """What warm-up runs: no slot is live."""
    state = init_state(program(), CONFIG, jnp.dtype("float32"))
    new_state, outputs = step(state, jnp.asarray(batch_builder().idle_inputs(PrefillShape(len(PROMPT)))))
    assert outputs.num_emitted.tolist() == [0]
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(new_state), strict=True):
        is_pool = old.ndim == 4
        assert np.array_equal(np.asarray(old)[is_pool:], np.asarray(new)[is_pool:])
