"""What edits logits, against its definition in numpy: each parameter alone and together, every row after its drafts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_jax.core.config import SamplingParams
from mtp_jax.core.sampling_params import FLOAT32_RANGE
from mtp_jax.core.types import Drafts, RowText, SamplingRows
from mtp_jax.engine.requests import Request
from mtp_jax.ops.penalties import edit_logits, token_facts
from mtp_jax.ops.row_text import text_after, texts_of_rows
from mtp_jax.ops.sampling import law_logits
from mtp_jax.testing.oracle import edited_logits, filtered_logits
from mtp_jax.testing.rows import sampling_rows, slot_view
from mtp_jax.testing.strategies import logit_edits

VOCAB, MAX_LEN, NUM_DRAFTS = 7, 12, 3
tokens = st.integers(0, VOCAB - 1)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Request, list[int], list[int], np.ndarray]:
    """A request, what it wrote, a launch's drafts, and logits for each of their rows."""
    words = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=3)
    edits = draw(logit_edits(VOCAB, max_min_tokens=8))
    if draw(st.booleans()):
        edits["bad_words"] = draw(words)  # of few tokens: such words are written
    prompt = draw(st.lists(tokens, min_size=1, max_size=4))
    written = draw(st.lists(st.integers(0, 2), max_size=5))
    params = SamplingParams(temperature=0.0, stop_token_ids=draw(st.lists(tokens, max_size=2)), **edits)
    drafts = draw(st.lists(st.integers(0, 2), min_size=NUM_DRAFTS, max_size=NUM_DRAFTS))
    seed = draw(st.integers(0, 1000))
    logits = np.random.default_rng(seed).integers(-256, 256, (NUM_DRAFTS + 1, VOCAB)).astype(np.float32) / 64
    return Request("a", tuple(prompt), params, seed=0), written, drafts, logits


def with_room(params: SamplingParams) -> SamplingParams:
    """The same, its lists filled up with what must have no effect: so that one shape is compiled."""
    stops, bias, words = list(params.stop_token_ids or ()), dict(params.logit_bias or {}), list(params.bad_words or ())
    others = [token for token in range(VOCAB) if token not in bias]
    return replace(
        params,
        stop_token_ids=stops + [-1] * (2 - len(stops)),
        logit_bias=bias | dict.fromkeys(others[: 4 - len(bias)], 9.0),
        bad_words=[*words, *[(0, 1, 2)] * (3 - len(words))],
    )


@jax.jit
def edited(
    logits_BWV: jax.Array, rows: SamplingRows, history_BS: jax.Array, num_known: jax.Array, drafts_BK: jax.Array
) -> jax.Array:
    """By verification's rows; and the last of them again as a row of drafting."""
    slots = slot_view(rows, vocab_size=VOCAB, draft_len=NUM_DRAFTS, committed_len=num_known - 1, history_BS=history_BS)
    verified_BWV = edit_logits(logits_BWV, rows, texts_of_rows(slots, Drafts(drafts_BK)))
    drafted_B1V = edit_logits(logits_BWV[:, -1:], rows, text_after(slots, drafts_BK))
    return jnp.concatenate([verified_BWV, drafted_B1V], axis=1)


@settings(max_examples=4 * settings().max_examples)
@given(batch=st.tuples(cases(), cases()))
def test_each_row_is_edited_by_its_definition(batch: tuple) -> None:
    """Two slots of one launch; what lies beyond a slot's text in its history is some other text."""
    history = np.full((2, MAX_LEN), 1, np.int32)
    for row, (request, written, _, _) in zip(history, batch, strict=True):
        text = [*request.prompt, *written]
        row[: len(text)] = text
    num_known = [len(request.prompt) + len(written) for request, written, _, _ in batch]
    params = [with_room(request.params) for request, *_ in batch]
    rows = sampling_rows(*params, prompt_lens=[len(request.prompt) for request, *_ in batch])
    rows = replace(
        rows,
        num_biases_B=jnp.array([len(request.params.logit_bias or ()) for request, *_ in batch], jnp.int32),
        num_bad_words_B=jnp.array([len(request.params.bad_words or ()) for request, *_ in batch], jnp.int32),
    )
    logits = np.stack([logits for *_, logits in batch])
    drafts = np.array([drafts for _, _, drafts, _ in batch], np.int32)
    actual = np.asarray(edited(jnp.asarray(logits), rows, jnp.asarray(history), jnp.array(num_known), drafts))
    for slot, (request, written, draft, _) in enumerate(batch):
        for row in range(NUM_DRAFTS + 1):
            text = [*request.prompt, *written, *draft[:row]]
            np.testing.assert_array_equal(actual[slot, row], edited_logits(logits[slot, row], request, text))
        np.testing.assert_array_equal(actual[slot, -1], actual[slot, -2])


def law_of_one_row(params: SamplingParams, logits: list[float], history: list[int], prompt_len: int) -> np.ndarray:
    rows = sampling_rows(params, prompt_lens=[prompt_len])
    known = jnp.array([len(history)], jnp.int32)
    history_BS = jnp.array([history], jnp.int32)
    facts = token_facts(rows, history_BS, known, len(logits))
    text = RowText(history_BS, known, history_BS[:, :0], jnp.zeros((1, 1, 0), bool), facts)
    return np.asarray(law_logits(jnp.array([[logits]], jnp.float32), rows, text))[0, 0]


def test_edits_come_before_the_temperature_and_filters_after() -> None:
    """At temperature 1/2 the bias is doubled with the logit, top-k looks at edited logits, what is banned stays out."""
    params = SamplingParams(temperature=0.5, logit_bias={0: 3.0}, top_k=2, bad_words=[(3,)], presence_penalty=1.0)
    law = law_of_one_row(params, [0.0, 1.0, 2.5, 9.0], [0, 2], prompt_len=1)
    assert law.tolist() == [0.0, -np.inf, -3.0, -np.inf]
    request = Request("a", (0,), params, seed=0)
    logits = np.array([0.0, 1.0, 2.5, 9.0], np.float32)
    assert law.tolist() == filtered_logits(edited_logits(logits, request, [0, 2]), params).tolist()


def test_bug_b23_drafts_of_one_token_are_penalised_more_and_more() -> None:
    """Row w of a launch that drafts x x x sees w of them."""
    rows = sampling_rows(SamplingParams(temperature=0.0, frequency_penalty=1.0))
    slots = slot_view(rows, vocab_size=4, draft_len=3, committed_len=[0], history_BS=jnp.array([[1] * 8], jnp.int32))
    drafts = Drafts(jnp.array([[2, 2, 2]], jnp.int32))
    law = law_logits(jnp.zeros((1, 4, 4)), rows, texts_of_rows(slots, drafts))
    assert law[0, :, 2].tolist() == [0.0, -1.0, -2.0, -3.0]
    assert law[0, :, 1].tolist() == [-1.0] * 4  # the pending token


def test_a_tree_row_speaks_after_its_own_ancestors() -> None:
    """Two branches 1-2 and 1-3 of one launch: the word 1-3 ends in 0 after the second only."""
    rows = sampling_rows(SamplingParams(temperature=0.0, bad_words=[(1, 3, 0)], presence_penalty=0.5))
    slots = slot_view(rows, vocab_size=4, draft_len=3, committed_len=[0], history_BS=jnp.zeros((1, 4), jnp.int32))
    is_before = jnp.array([[[1, 1, 0], [1, 0, 1]]], bool)
    text = RowText(slots.history_BS, slots.committed_len + 1, jnp.array([[1, 2, 3]]), is_before, slots.facts)
    law = law_logits(jnp.zeros((1, 2, 4)), rows, text)
    assert law[0].tolist() == [[-0.5, -0.5, -0.5, 0.0], [-np.inf, -0.5, 0.0, -0.5]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("repetition", FLOAT32_RANGE)
@pytest.mark.parametrize("bias", [-FLOAT32_RANGE[1], FLOAT32_RANGE[1]])
def test_extreme_edits_leave_a_law(temperature: float, repetition: float, bias: float) -> None:
    """Never NaN, never everything out: what passes float32's range is as large as can be."""
    params = SamplingParams(temperature=temperature, repetition_penalty=repetition, logit_bias={0: bias, 2: bias})
    law = law_of_one_row(params, [5.0, -3.0, 2.0], [0, 1], prompt_len=1)
    assert not np.isnan(law).any()
    assert np.isfinite(law.max())


def test_neighbours_that_edit_change_no_bit_of_a_slot_that_does_not() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=1.0, repetition_penalty=3.0, bad_words=[(0,)])
    rows = sampling_rows(params, SamplingParams(temperature=0.0), prompt_lens=(1, 1))
    logits = jax.random.normal(jax.random.key(1), (2, 2, VOCAB))
    slots = slot_view(rows, vocab_size=VOCAB, draft_len=1, committed_len=[3, 3])
    law = law_logits(logits, rows, texts_of_rows(slots, Drafts(jnp.array([[1], [1]], jnp.int32))))
    assert jnp.array_equal(law[1], logits[1])
    assert bool(jnp.all(jnp.isneginf(law[0, :, 0])))
