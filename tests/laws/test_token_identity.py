"""Law: speculative tokens are plain decoding's tokens, whatever the schedule, the batch, the pages and the plan.

The drafts are checked too: an MTP layer with a hole in its cache, or one that saw a stale token, proposes others.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_jax.engine.engine import Engine
from mtp_jax.testing.driving import run_plan
from mtp_jax.testing.engines import poison, restart
from mtp_jax.testing.strategies import batches, draft_schedules, plans
from tests.laws.support import ENGINES, assert_plain


@pytest.fixture(params=ENGINES.values(), ids=list(ENGINES), scope="module")
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.param()


@settings(max_examples=3 * settings().max_examples)
@given(data=st.data())
def test_tokens_are_those_of_plain_decoding(engine: Engine, data: st.DataObject) -> None:
    config = engine.config
    requests = data.draw(batches(engine.family.vocab_size, max_model_len=config.max_model_len))
    fewest = config.pages_per_slot
    running = restart(
        engine,
        policy=data.draw(draft_schedules(config.max_draft_len)),
        readback_depth=data.draw(st.integers(0, 2)),
        num_pages=data.draw(st.sampled_from((fewest, min(fewest + 2, config.num_pages), config.num_pages))),
        near_limit=data.draw(st.sampled_from(("row_cap", "group_zero"))),
    )
    poison(running)
    run = run_plan(running, requests, data.draw(plans(len(requests))))
    assert_plain(running, requests, run)
