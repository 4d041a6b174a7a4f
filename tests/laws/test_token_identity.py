"""Law: speculative tokens are plain decoding's tokens, whatever the schedule, the batch, the pages and the plan."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.engine.engine import Engine
from mtp_jax.testing.driving import run_plan
from mtp_jax.testing.engines import restart, toy_engine
from mtp_jax.testing.oracle import plain_decode
from mtp_jax.testing.strategies import batches, draft_schedules, plans
from mtp_jax.testing.toy_family import ToyFamily

CONFIGURATIONS = {
    "recursive, pages of 4": lambda: toy_engine(),
    "recursive, latent, pages of 1, chunks of 5": lambda: toy_engine(
        ToyFamily(latent=True), page_size=1, prefill_chunk=5
    ),
    "two MTP layers, latent, pages of 16, chunks of 3": lambda: toy_engine(
        ToyFamily(num_mtp_layers=2, latent=True), max_draft_len=2, page_size=16, prefill_chunk=3
    ),
    "three MTP layers, pages of 4, chunks of 1": lambda: toy_engine(
        ToyFamily(num_mtp_layers=3), max_num_seqs=2, prefill_chunk=1
    ),
    "three MTP layers of which the first is applied again and again": lambda: toy_engine(
        ToyFamily(num_mtp_layers=3), method="mtp_eagle", max_num_seqs=1, page_size=16
    ),
}


@pytest.fixture(params=CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys(), scope="module")
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.param()


@given(data=st.data())
def test_tokens_are_those_of_plain_decoding(engine: Engine, data: st.DataObject) -> None:
    family, config = engine.family, engine.config
    requests = data.draw(batches(family.vocab_size, max_model_len=config.max_model_len))
    running = restart(
        engine,
        policy=data.draw(draft_schedules(config.max_draft_len)),
        readback_depth=data.draw(st.integers(0, 2)),
        num_pages=data.draw(st.sampled_from((config.pages_per_slot, config.num_pages))),
    )
    run = run_plan(running, requests, data.draw(plans(len(requests))))
    for request in requests:
        if request.request_id in run.cancelled:
            continue
        expected = plain_decode(family.plain_logits, request, max_model_len=config.max_model_len)
        last = run.finished[request.request_id]
        assert tuple(last.state.tokens) == expected.tokens
        assert (last.finish_reason, last.stop_reason) == (expected.finish_reason, expected.stop_reason)
