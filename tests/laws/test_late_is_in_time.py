"""Law: reading results late changes nothing; a step is never launched twice, and no result is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_pallas.paged_attention import BACKENDS, Backend
from mtp_jax.engine.requests import Request
from mtp_jax.testing.driving import Plan, run_plan
from mtp_jax.testing.engines import restart
from mtp_jax.testing.policies import ScriptedDraftLen
from mtp_jax.testing.strategies import batches, draft_schedules, plans
from tests.laws.support import THREE_SLOTS, request


@given(batch=batches(29, max_model_len=48), schedule=draft_schedules(3), plan=plans(5, max_events=0))
def test_late_equals_in_time(batch: tuple[Request, ...], schedule: ScriptedDraftLen, plan: Plan) -> None:
    runs = [run_plan(restart(THREE_SLOTS(), policy=schedule, readback_depth=depth), batch, plan) for depth in range(3)]
    tokens = [{name: last.state.tokens for name, last in run.finished.items()} for run in runs]
    reasons = [{name: last.finish_reason for name, last in run.finished.items()} for run in runs]
    assert tokens[0] == tokens[1] == tokens[2]
    assert reasons[0] == reasons[1] == reasons[2]


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=list(BACKENDS))
def test_b12_each_backend_says_whether_it_takes_device_lengths(backend: Backend) -> None:
    assert backend.supports_device_lengths is True


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_b12_overlap_is_what_was_asked(depth: int) -> None:
    """Depth 0 stays off: never a launch in flight between two steps. Depth 2 really has two."""
    engine = restart(THREE_SLOTS(), readback_depth=depth)
    in_flight: list[int] = []
    one = request("a", (1, 2, 3), temperature=0.0, max_tokens=20)
    run_plan(engine, [one], after_step=lambda engine: in_flight.append(len(engine._readback)))
    assert max(in_flight) == depth


@given(seed=st.integers(0, 2**64 - 1))
def test_bug_b02_draws_do_not_depend_on_k(seed: int) -> None:
    """A seeded request, beside a neighbour, under draft lengths of all kinds."""
    seeded = request("seeded", (6, 6), temperature=1.0, max_tokens=10, seed=seed)
    other = request("other", (2,), temperature=0.0, max_tokens=14)
    texts = set()
    for wishes in ((0,), (3,), (0, 3), (3, 0, 0, 1)):
        run = run_plan(restart(THREE_SLOTS(), policy=ScriptedDraftLen(wishes)), [other, seeded])
        texts.add(tuple(run.finished["seeded"].state.tokens))
    assert len(texts) == 1
