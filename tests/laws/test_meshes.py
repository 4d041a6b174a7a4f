"""Law: tokens do not depend on the mesh. Every data shard schedules its own slots; the vote keeps them in step."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_jax.engine.engine import Engine
from mtp_jax.testing.driving import Plan, run_plan
from mtp_jax.testing.engines import poison, restart, toy_engine
from mtp_jax.testing.oracle import log_softmax
from mtp_jax.testing.policies import ScriptedDraftLen
from mtp_jax.testing.strategies import batches, draft_schedules, plans
from mtp_jax.testing.toy_family import ToyFamily
from tests.laws.support import assert_plain, request

MESHES = ((8, 1), (4, 2), (2, 4), (1, 8))
FAMILY = ToyFamily(vocab_size=24)
SMALL_VOCABULARY = ToyFamily(vocab_size=16)


PROPOSERS: dict[str, dict[str, Any]] = {
    "shortlist": {"draft_vocab_size": 8},
    "trees": {"method": "dynamic_tree", "tree_topk": 2, "tree_nodes": 5},
    "prompt lookup": {"method": "ngram", "prompt_lookup_min": 1},
    "prompt lookup, then an MTP layer": {"method": "ngram_mtp", "prompt_lookup_min": 2},
}
"""Ways to draft beside the plain MTP layer."""


def engine_on(data: int, model: int, family: ToyFamily = FAMILY, *, max_draft_len: int = 3, **drafting: Any) -> Engine:
    return toy_engine(
        family,
        data=data,
        model=model,
        max_draft_len=max_draft_len,
        max_num_seqs=max(data, 2),
        max_model_len=32,
        page_size=4,
        **drafting,
    )


@pytest.fixture(params=MESHES, ids=lambda mesh: f"data {mesh[0]}, model {mesh[1]}", scope="module")
def engine(request: pytest.FixtureRequest) -> Engine:
    return engine_on(*request.param)


@settings(max_examples=max(settings().max_examples // 2, 10))
@given(data=st.data())
def test_a_mesh_gives_the_tokens_of_plain_decoding(engine: Engine, data: st.DataObject) -> None:
    assert_tokens_are_plain(engine, data)


@pytest.mark.parametrize("drafting", PROPOSERS.values(), ids=PROPOSERS)
@settings(max_examples=10)
@given(data=st.data())
def test_so_it_does_however_drafts_are_made(drafting: dict[str, Any], data: st.DataObject) -> None:
    assert_tokens_are_plain(engine_on(2, 2, SMALL_VOCABULARY, **drafting), data)


@pytest.mark.long
@settings(max_examples=10)
@given(data=st.data())
def test_so_it_does_with_a_layer_for_each_draft(data: st.DataObject) -> None:
    family = ToyFamily(vocab_size=16, num_mtp_layers=2)
    assert_tokens_are_plain(engine_on(2, 2, family, max_draft_len=2), data)


def assert_tokens_are_plain(engine: Engine, data: st.DataObject) -> None:
    requests = data.draw(batches(engine.family.vocab_size, max_model_len=32, max_size=6, max_tokens=12))
    num_shards = engine.config.mesh.data
    running = restart(
        engine,
        policies=data.draw(st.lists(draft_schedules(3, max_size=6), min_size=num_shards, max_size=num_shards)),
        readback_depth=data.draw(st.integers(0, 2)),
        near_limit=data.draw(st.sampled_from(("row_cap", "group_zero"))),
    )
    poison(running)
    run = run_plan(running, requests, data.draw(plans(len(requests), max_step=12)))
    assert_plain(running, requests, run)
    assert_replicas_agree(running)


def assert_replicas_agree(engine: Engine) -> None:
    """The devices of a data shard hold the same slots: no partial result was taken for the whole."""
    state = engine.launcher._state
    for array in (state.committed_len, state.pending_token, state.finished):
        by_rows: dict[object, np.ndarray] = {}
        for shard in array.addressable_shards:
            rows = np.asarray(shard.data)
            assert np.array_equal(by_rows.setdefault(shard.index[0].start or 0, rows), rows)


def test_shards_in_one_process_run_requests_side_by_side() -> None:
    engine = restart(engine_on(4, 2))
    run = run_plan(engine, [request(str(i), (i, 2), max_tokens=8, temperature=0.0) for i in range(4)])
    assert len(run.finished) == 4
    alone = run_plan(restart(engine), [request("0", (0, 2), max_tokens=8, temperature=0.0)])
    assert run.num_steps <= alone.num_steps + 1


def test_b15_greedy_and_sampled_shards_share_a_step() -> None:
    """One data shard samples, the other does not; both follow one program."""
    engine = restart(engine_on(2, 4), policy=ScriptedDraftLen((3,)))
    requests = [
        request("0", (5,), max_tokens=12, temperature=0.0),
        request("1", (6,), max_tokens=12, temperature=1.0, top_p=0.9),
    ]
    assert_plain(engine, requests, run_plan(engine, requests))


def test_penalties_and_scored_prompts_share_a_mesh() -> None:
    """Greedy slots that edit logits need whole ones, and a prompt's scores theirs, on every device or on none."""
    engine = restart(engine_on(2, 4), policy=ScriptedDraftLen((3,)))
    edits = {"frequency_penalty": 0.5, "repetition_penalty": 1.25, "logit_bias": {3: 2.0}, "bad_words": [(4,), (7, 7)]}
    requests = [
        request("0", (5, 5, 2), max_tokens=12, temperature=0.0, **edits),
        request("1", (6,) * 9, max_tokens=8, temperature=0.0, prompt_logprobs=2),
        request("2", (7, 8), max_tokens=12, temperature=0.0),
        request("3", (9, 8), max_tokens=12, temperature=1.0, min_tokens=6, stop_token_ids=(1, 2, 3), **edits),
    ]
    run = run_plan(engine, requests, Plan(arrivals=(0, 2, 4, 6)))
    assert_plain(engine, requests, run)
    scores = run.finished["1"].state.prompt_logprobs
    expected = [log_softmax(FAMILY.plain_logits((6,) * length))[6] for length in range(1, 9)]
    assert [score.logprob for score in scores] == pytest.approx(expected, abs=1e-5)
    assert run.finished["0"].state.prompt_logprobs == []
    assert_replicas_agree(engine)
