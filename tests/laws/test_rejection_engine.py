"""B8 through the engine: rejection sampling keeps the law whatever the draft lengths, results read late or at once.

The law of the next token follows the last token alone, so every token is a draw of known law; each is judged apart by
the draft length of its step, that of the step before, and its place in the step. A drafter as wrong as can be.
"""

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.core.config import SamplingParams
from mtp_jax.core.types import Drafts
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.requests import Request, RequestState
from mtp_jax.ops.sharding import NO_PARALLEL
from mtp_jax.proposers import mtp
from mtp_jax.testing.driving import run_plan
from mtp_jax.testing.engines import restart, toy_engine
from mtp_jax.testing.policies import ScriptedDraftLen
from mtp_jax.testing.toy_family import ToyFamily
from tests.laws.rejection import logits, reversed_law
from tests.laws.test_rejection_drawn import BOUND

VOCAB, MAX_LEN = 8, 256
TARGET = logits(VOCAB, VOCAB) / 2  # no token so rare that few draws would not tell
DRAFTER = reversed_law(TARGET)
LAW = np.exp(TARGET.astype(np.float64)) / np.exp(TARGET.astype(np.float64)).sum(axis=1, keepdims=True)
Step = tuple[int | None, int, int]
"""Draft length of the step before (None: the prompt), that of the step, place among the tokens of the step."""


@dataclass(frozen=True)
class LastToken(ToyFamily):
    """The law of the next token follows the last one alone; that of the drafter is the same, reversed."""

    vocab_size: int = VOCAB

    def forward(
        self, weights: Any, tokens_BW: Any, positions_BW: Any, kv: Any, attend: Any, parallel: Any = NO_PARALLEL
    ) -> Any:
        hidden_BWD, kv = super().forward(weights, tokens_BW, positions_BW, kv, attend, parallel)
        return hidden_BWD.at[..., 0].set(tokens_BW.astype(hidden_BWD.dtype)), kv

    def unembed(self, weights: Any, hidden_BWD: Any, parallel: Any = NO_PARALLEL) -> Any:
        return parallel.own_vocab(jnp.array(TARGET)[hidden_BWD[..., 0].astype(jnp.int32)])

    def draft_forward(self, weights: Any, depth: int, tokens_BW: Any, *others: Any) -> Any:
        hidden_BWD, _, layer_kv = super().draft_forward(weights, depth, tokens_BW, *others)
        hidden_BWD = hidden_BWD.at[..., 0].set(tokens_BW.astype(hidden_BWD.dtype))
        return hidden_BWD, hidden_BWD, layer_kv

    def draft_unembed(self, weights: Any, depth: int, hidden_BWD: Any, parallel: Any = NO_PARALLEL) -> Any:
        return parallel.own_vocab(jnp.array(DRAFTER)[hidden_BWD[..., 0].astype(jnp.int32)])


ENGINE = functools.partial(
    toy_engine, LastToken(), acceptance="rejection", max_draft_len=4, max_num_seqs=1, max_model_len=MAX_LEN
)
EIGHT_SLOTS = functools.partial(ENGINE, max_num_seqs=8)


def served(engine: Engine, wishes: tuple[int, ...], num_tokens: int, *, depth: int) -> list[RequestState]:
    """Requests of together at least `num_tokens` tokens, under draft lengths that come again and again."""
    running = restart(engine, policy=ScriptedDraftLen(wishes * (num_tokens // len(wishes))), readback_depth=depth)
    params = SamplingParams(temperature=1.0, max_tokens=MAX_LEN)
    for seed in range(-(-num_tokens // (MAX_LEN - 1))):
        running.submit(Request(str(seed), (seed % VOCAB,), params, seed=seed, wants_trace=True))
    return [progress.state for progress in running.run() if progress.finish_reason is not None]


def surprises(states: list[RequestState]) -> Mapping[Step, float]:
    """Chi-square of the tokens after each token, less its degrees of freedom, in standard deviations."""
    pairs: dict[Step, Counter[tuple[int, int]]] = defaultdict(Counter)
    for state in states:
        text, before = [*state.request.prompt, *state.tokens], None
        for record in state.records:
            start = record.committed_len_before
            for place in range(len(record.emitted)):
                pairs[before, record.draft_len, place][text[start + place], text[start + place + 1]] += 1
            before = record.draft_len
    found = {}
    for step, counts in pairs.items():
        counts_VV = np.array([[counts[first, then] for then in range(VOCAB)] for first in range(VOCAB)])
        expected_VV = counts_VV.sum(axis=1, keepdims=True) * LAW
        is_enough = (expected_VV >= 5).all(axis=1)
        if is_enough.any():
            chi_square = ((counts_VV - expected_VV)[is_enough] ** 2 / expected_VV[is_enough]).sum()
            degrees = int(is_enough.sum()) * (VOCAB - 1)
            found[step] = float((chi_square - degrees) / np.sqrt(2 * degrees))
    return found


def assert_law(states: list[RequestState], wishes: tuple[int, ...]) -> None:
    found = surprises(states)
    assert {(before, then) for before, then, _ in found} >= {*itertools.pairwise(wishes)}
    assert max(found.values()) < BOUND


@pytest.mark.parametrize(
    ("wishes", "depth"),
    [pytest.param((3, 0, 0, 3, 3), 1, marks=pytest.mark.long, id="late"), pytest.param((2, 4, 2), 0, id="at once")],
)
def test_b08_every_change_of_draft_length_keeps_the_law(wishes: tuple[int, ...], depth: int) -> None:
    assert_law(served(ENGINE(), wishes, 8_000, depth=depth), wishes)


@pytest.mark.long
@pytest.mark.parametrize("wishes", [(3, 0, 3, 3), (3, 0, 0, 3, 3), (2, 4, 2)], ids=str)
@pytest.mark.parametrize("depth", [0, 1], ids=["read at once", "read late"])
def test_b08_the_same_of_200_000_tokens(wishes: tuple[int, ...], depth: int) -> None:
    assert_law(served(EIGHT_SLOTS(), wishes, 200_000, depth=depth), wishes)


@pytest.mark.long
def test_b08_the_law_of_another_draft_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two drafts of a step each is judged by the law of the other."""
    with_next_draft = mtp.with_next_draft

    def with_stale_law(*arguments: Any) -> Drafts:
        drafts = with_next_draft(*arguments)
        assert drafts.probs_BKV is not None
        return replace(drafts, probs_BKV=jnp.roll(drafts.probs_BKV, 1, axis=1))

    monkeypatch.setattr(mtp, "with_next_draft", with_stale_law)
    build = toy_engine.__wrapped__  # not kept: others would get it
    engine = build(LastToken(), acceptance="rejection", max_draft_len=2, max_num_seqs=1, max_model_len=MAX_LEN)
    assert max(surprises(served(engine, (2, 0, 2), 8_000, depth=1)).values()) > 2 * BOUND


@pytest.mark.long
def test_rejection_on_a_mesh_writes_what_one_device_writes() -> None:
    """Coins and noise are of seed and position: one device that is told the draft lengths agreed writes the same."""
    requests = [
        Request(str(i), (i, 5), SamplingParams(temperature=0.8 * (i % 3), max_tokens=40), seed=i, wants_trace=True)
        for i in range(6)
    ]
    on_mesh = toy_engine(
        LastToken(), acceptance="rejection", max_draft_len=2, max_num_seqs=2, max_model_len=MAX_LEN, data=2, model=2
    )
    policies = [ScriptedDraftLen((2, 2, 0) * 40), ScriptedDraftLen((2,))]
    together = run_plan(restart(on_mesh, policies=policies, readback_depth=0), requests).finished
    num_accepted = 0
    for one in requests:
        state = together[one.request_id].state
        policy = ScriptedDraftLen(tuple(state.metrics.draft_lens))
        alone = run_plan(restart(ENGINE(), policy=policy, readback_depth=0), [one]).finished[one.request_id].state
        assert alone.tokens == state.tokens
        num_accepted += state.metrics.num_accepted_tokens
    assert num_accepted > 20
