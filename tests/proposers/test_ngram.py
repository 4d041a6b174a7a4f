"""Prompt lookup against its definition in plain Python, and the two ways it can stand beside a model's drafts."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mtp_jax.core.config import SamplingParams, SpeculativeConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.core.types import Drafts
from mtp_jax.engine.requests import Request
from mtp_jax.ops.sharding import NO_PARALLEL
from mtp_jax.proposers.lookup_first import LookupFirst
from mtp_jax.proposers.ngram import PromptLookup, look_up
from mtp_jax.proposers.registry import PROPOSERS, resolve_method
from mtp_jax.testing.engines import restart, toy_engine
from mtp_jax.testing.oracle import plain_lookup
from mtp_jax.testing.rows import sampling_rows, slot_view
from mtp_jax.testing.toy_family import ToyFamily

WIDTH, NUM_DRAFTS, MAX_MATCH = 14, 4, 3
looked_up = jax.jit(look_up, static_argnames=("num_drafts", "max_match"))


@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=WIDTH), min_size=2, max_size=2),
    max_match=st.sampled_from((MAX_MATCH, 10**12)),
)
@example([[0] * WIDTH, [1, 2, 0]], MAX_MATCH)  # one period of length 1; nothing repeats
@example([[0] * WIDTH, [1, 2, 0]], 10**12)
@example([[1], [2]], MAX_MATCH)
@example([[0, 1, 2, 0, 1, 2, 0], [2, 1, 1, 2, 1]], MAX_MATCH)
def test_the_longest_and_then_the_latest_match_is_copied(texts: list[list[int]], max_match: int) -> None:
    """A few tokens are compared, or all there are."""
    # What is past the text would match it: it must not be looked at.
    history = np.stack([np.resize(text, WIDTH) for text in texts]).astype(np.int32)
    lengths = jnp.array([len(text) for text in texts], jnp.int32)
    drafts, match_len = looked_up(history, lengths, num_drafts=NUM_DRAFTS, max_match=max_match)
    for slot, text in enumerate(texts):
        expected, expected_len = plain_lookup(text, NUM_DRAFTS, max_match)
        assert int(match_len[slot]) == expected_len
        if expected_len:
            assert tuple(drafts[slot].tolist()) == expected


def slots_with(texts: list[list[int]], draft_len: int, **fields: object):
    history = np.zeros((len(texts), WIDTH), np.int32)
    for row, text in zip(history, texts, strict=True):
        row[: len(text)] = text
    return slot_view(
        sampling_rows(*[SamplingParams(temperature=0)] * len(texts)),
        vocab_size=8,
        draft_len=draft_len,
        committed_len=[len(text) - 1 for text in texts],
        history_BS=jnp.asarray(history),
        **fields,
    )


def test_a_match_that_is_too_short_proposes_nothing() -> None:
    slots = slots_with([[1, 2, 3, 1, 2], [1, 2, 3, 0, 2], [1, 2, 3, 1, 2]], 2, live=jnp.array([True, True, False]))
    drafts = PromptLookup(min_match=2, max_match=5)(slots, 2)
    assert drafts.num_proposed is not None
    assert drafts.num_proposed.tolist() == [2, 0, 0]
    assert drafts.tokens_BK[0].tolist() == [3, 1]
    drafts = PromptLookup(min_match=10**12, max_match=10**12)(slots, 2)
    assert drafts.num_proposed is not None
    assert not drafts.num_proposed.any()


@pytest.mark.parametrize("has_law", [False, True])
def test_lookup_takes_the_place_of_the_models_drafts_where_it_finds_enough(has_law: bool) -> None:
    lookup = PromptLookup(min_match=2, max_match=2)
    slots = slots_with([[1, 2, 3, 1, 2], [1, 2, 3, 4, 5]], 2)
    law_BKV = jnp.full((2, 2, 8), 1 / 8) if has_law else None

    class Sevens:
        def propose(self, model, carry, draft_kv, slots, *, draft_len):
            return Drafts(jnp.full((2, draft_len), 7), law_BKV), carry, draft_kv

    drafts, _, _ = LookupFirst(Sevens(), lookup).propose(None, None, (), slots, draft_len=2)  # type: ignore[arg-type]
    assert drafts.tokens_BK.tolist() == [[3, 1], [7, 7]]
    assert drafts.num_proposed is None
    if has_law:
        assert drafts.probs_BKV is not None
        np.testing.assert_array_equal(drafts.probs_BKV[0], np.eye(8)[[3, 1]])
        np.testing.assert_array_equal(drafts.probs_BKV[1], np.full((2, 8), 1 / 8))


def lookup_of(**options: int | None) -> PromptLookup:
    spec = SpeculativeConfig(method="ngram", **options)  # type: ignore[arg-type]
    return PROPOSERS["ngram"].build(ToyFamily(), spec).draft  # type: ignore[attr-defined]


def test_bounds_of_the_match() -> None:
    assert lookup_of() == PromptLookup(2, 5)
    assert lookup_of(prompt_lookup_min=7) == PromptLookup(7, 7)
    assert lookup_of(prompt_lookup_max=1) == PromptLookup(1, 1)
    assert lookup_of(prompt_lookup_min=3, prompt_lookup_max=4) == PromptLookup(3, 4)
    with pytest.raises(ConfigError, match="prompt_lookup_min is 4 and prompt_lookup_max 3; the first must not be"):
        lookup_of(prompt_lookup_min=4, prompt_lookup_max=3)
    with pytest.raises(ConfigError, match="prompt_lookup_max is 0; it must be an integer at least 1"):
        lookup_of(prompt_lookup_max=0)


def test_a_method_that_looks_nothing_up_refuses_the_bounds() -> None:
    spec = SpeculativeConfig(method="mtp", prompt_lookup_min=3)
    with pytest.raises(ConfigError, match="prompt_lookup_min is 3, which method 'mtp' has no use for"):
        resolve_method(spec, ToyFamily())


def test_copies_are_not_drawn_so_how_to_draw_them_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft_sampling is 'coupled', which method 'ngram' has no use for"):
        resolve_method(SpeculativeConfig(method="ngram", draft_sampling="coupled"), ToyFamily())


def test_lookup_alone_needs_no_mtp_layer() -> None:
    assert resolve_method(SpeculativeConfig(method="ngram"), ToyFamily(num_mtp_layers=0)) == ("ngram", 3)


def test_copies_are_accepted_where_the_text_repeats_and_counted_only_where_there_are_any() -> None:
    """Through an engine whose greedy text goes round in a circle: nothing is drafted before it has closed."""
    family = Circle()
    engine = toy_engine(family, method="ngram", max_model_len=40, max_num_seqs=1)  # type: ignore[arg-type]
    running = restart(engine)
    request = Request("a", (3,), SamplingParams(temperature=0, max_tokens=30), seed=0, wants_trace=True)
    running.submit(request)
    last = [*running.run()][-1]
    assert last.state.tokens == [(4 + i) % 7 for i in range(30)]
    silent = [record for record in last.state.records if not record.drafts]
    assert [record.num_accepted for record in silent] == [0] * 7  # 3 4 5 6 0 1 2 3 4: then two tokens repeat
    full = [record for record in last.state.records if record.drafts]
    assert all(record.num_accepted == len(record.drafts) for record in full)
    assert last.state.metrics.num_draft_tokens == sum(len(record.drafts) for record in full)


@dataclass(frozen=True)
class Circle(ToyFamily):
    """The next token is the one after the last, modulo 7."""

    vocab_size: int = 7
    num_mtp_layers: int = 0

    def forward(self, weights, tokens_BW, positions_BW, kv, attend, parallel=NO_PARALLEL):
        hidden_BWD, kv = super().forward(weights, tokens_BW, positions_BW, kv, attend, parallel)
        return hidden_BWD.at[..., 0].set(tokens_BW.astype(hidden_BWD.dtype)), kv

    def unembed(self, weights, hidden_BWD, parallel=NO_PARALLEL):
        return jax.nn.one_hot((hidden_BWD[..., 0].astype(jnp.int32) + 1) % 7, 7)
