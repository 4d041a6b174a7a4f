"""Law: speculative tokens are plain decoding's tokens, whatever the schedule, the batch, the pages and the plan.

The drafts are checked too: an MTP layer with a hole in its cache, or one that saw a stale token, proposes others.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_jax.core.config import SpeculativeConfig
from mtp_jax.engine.engine import Engine
from mtp_jax.policies.api import DraftLenPolicy
from mtp_jax.policies.registry import POLICIES, policy_of
from mtp_jax.testing.driving import run_plan
from mtp_jax.testing.engines import poison, restart
from mtp_jax.testing.strategies import batches, draft_schedules, plans
from tests.laws.support import ENGINES, assert_plain


@pytest.fixture(params=ENGINES.values(), ids=list(ENGINES), scope="module")
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.param()


def draft_policies(engine: Engine) -> st.SearchStrategy[DraftLenPolicy]:
    """Any schedule of lengths, and every policy there is, with or without a gate; costs are made up."""
    kmax = engine.config.max_draft_len
    spec = replace(engine.config.speculative, policy="schedule", draft_len_schedule={1: kmax, 2: kmax // 2})
    built = [
        replace(spec, policy=name, draft_len_schedule=spec.draft_len_schedule if name == "schedule" else None)
        for name in POLICIES
    ]
    cost_of_a_draft = st.floats(0.01, 2.0)
    gates = st.sampled_from((None, 0.3, 0.95))

    def policy(one: SpeculativeConfig, cost: float, gate: float | None) -> DraftLenPolicy:
        costs = {(shape.slots, shape.draft_len): 1 + cost * shape.draft_len for shape in engine.grid.all_steps()}
        window = 4 if gate is not None else one.acceptance_window
        return policy_of(replace(one, disable_below_acceptance=gate, acceptance_window=window), costs)

    return draft_schedules(kmax) | st.builds(policy, st.sampled_from(built), cost_of_a_draft, gates)


@settings(max_examples=2 * settings().max_examples)
@given(data=st.data())
def test_tokens_are_those_of_plain_decoding(engine: Engine, data: st.DataObject) -> None:
    config = engine.config
    requests = data.draw(batches(engine.family.vocab_size, max_model_len=config.max_model_len))
    fewest = config.pages_per_slot
    running = restart(
        engine,
        policy=data.draw(draft_policies(engine)),
        readback_depth=data.draw(st.integers(0, 2)),
        num_pages=data.draw(st.sampled_from((fewest, min(fewest + 2, config.num_pages), config.num_pages))),
        near_limit=data.draw(st.sampled_from(("row_cap", "group_zero"))),
    )
    poison(running)
    run = run_plan(running, requests, data.draw(plans(len(requests))))
    assert_plain(running, requests, run)
