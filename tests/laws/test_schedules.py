"""Draft-length schedules: zeros, jumps and endings change what a step costs, and nothing else."""

import dataclasses
from collections.abc import Callable

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.engine.decisions import LaunchDecision, StepDecision
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.readback import Launch
from mtp_jax.engine.requests import Progress, Request
from mtp_jax.policies.fixed import FixedDraftLen
from mtp_jax.policies.gate import AcceptanceGate
from mtp_jax.testing.driving import run_plan
from mtp_jax.testing.engines import restart
from mtp_jax.testing.policies import ScriptedDraftLen
from mtp_jax.testing.strategies import draft_schedules, prompts
from tests.laws.support import ENGINES, THREE_SLOTS, TREE, assert_plain, request

KMAX = 3


def serve(engine: Engine, one: Request, *wishes: int, depth: int = 1) -> Progress:
    running = restart(engine, policy=ScriptedDraftLen(wishes), readback_depth=depth)
    run = run_plan(running, [one])
    assert_plain(running, [one], run)
    return run.finished[one.request_id]


def test_b05_the_decision_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch does is in its record: changing every other source afterwards changes nothing."""
    engine = THREE_SLOTS()
    one = request("a", (3, 1, 4), temperature=0.0, max_tokens=20)
    expected = serve(engine, one, 2, depth=2)

    running = restart(engine, policy=ScriptedDraftLen((2,)), readback_depth=2)
    launch = running.launcher.launch

    def launch_under_another_policy(decision: LaunchDecision, inputs: jax.Array) -> Launch:
        running.scheduler.policy = ScriptedDraftLen((0,))
        launched = launch(decision, inputs)
        running.scheduler.policy = ScriptedDraftLen((2,))
        return launched

    monkeypatch.setattr(running.launcher, "launch", launch_under_another_policy)
    changed = run_plan(running, [one]).finished["a"]
    assert changed.state.records == expected.state.records
    assert changed.state.metrics.draft_lens == expected.state.metrics.draft_lens

    decision = StepDecision(1, running.grid.choose(1, 2), ())
    with pytest.raises(dataclasses.FrozenInstanceError):
        decision.shape = running.grid.choose(1, 0)  # type: ignore[misc]


@pytest.mark.parametrize("build", ENGINES.values(), ids=ENGINES)
def test_b06_any_zero_clears_the_drafts(build: Callable[[], Engine]) -> None:
    """Speculation turned off for good: same tokens, counters stand still, pages grow by one position a step."""
    engine = build()
    kmax, page_size = engine.config.max_draft_len, engine.config.cache.page_size
    one = request("a", (1, 1, 2, 3), temperature=0.0, max_tokens=36)
    last = serve(engine, one, *(kmax,) * 4, 0)
    metrics, records = last.state.metrics, last.state.records
    assert metrics.draft_lens == [kmax] * 4 + [0] * (metrics.num_steps - 4)
    assert metrics.num_steps > 8
    assert metrics.num_draft_tokens == sum(len(record.drafts) for record in records[:4])
    assert all(record.drafts == () and record.num_accepted == 0 for record in records[4:])
    assert all(len(record.emitted) == 1 for record in records[4:])
    # The bound is at most two plain steps ahead (one in flight, one launched) once the drafting ones are settled.
    for record in records[6:]:
        assert record.num_pages <= max(-(-(record.committed_len_before + 2) // page_size), records[5].num_pages)


@pytest.mark.parametrize("pattern", [(3, 0, 3, 3), (3, 0, 0, 3, 3), (2, 3, 2), (0, 3), (3, 1, 3, 2, 0, 1)])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bug_b70_every_change_of_length(pattern: tuple[int, ...], depth: int, temperature: float) -> None:
    one = request("a", (7, 7, 1), temperature=temperature, seed=5, max_tokens=30)
    serve(THREE_SLOTS(), one, *pattern * 8, depth=depth)


@pytest.mark.parametrize("build", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b17_draft_cache_has_no_holes(build: Callable[[], Engine], temperature: float) -> None:
    """After zero steps the same text gets the same drafts, and so the same acceptance, as without them."""
    engine = build()
    kmax, num_compared = engine.config.max_draft_len, 0
    for first in range(8):
        one = request("a", (first % 4, 3, 3), temperature=temperature, seed=first, max_tokens=34)
        always = {record.committed_len_before: record for record in serve(engine, one, kmax).state.records}
        with_zeros = serve(engine, one, *(kmax, 0, 0, 0, kmax) * 8).state.records
        drafting = [rec for rec in with_zeros if rec.draft_len == kmax and rec.committed_len_before in always]
        assert drafting
        for record in drafting:
            other = always[record.committed_len_before]
            if record.parents is not None and len(record.drafts) != len(other.drafts):
                continue  # a tree that was cut went on from fewer nodes
            assert record.parents == other.parents
            shared = min(len(record.drafts), len(other.drafts))
            assert record.drafts[:shared] == other.drafts[:shared]
            assert min(record.num_accepted, shared) == min(other.num_accepted, shared)
            num_compared += shared > 0
    assert num_compared > 8


@given(prompt=prompts(29, max_len=20), data=st.data())
def test_bug_b64_drafts_after_zeros_are_those_of_a_cold_start(prompt: tuple[int, ...], data: st.DataObject) -> None:
    """Twelve zero steps, then K = 3: the drafts are those of a request whose prompt is all of that text."""
    engine = data.draw(st.sampled_from(list(ENGINES.values())))()
    kmax = engine.config.max_draft_len
    prompt = tuple(token % engine.family.vocab_size for token in prompt)
    warm = serve(engine, request("a", prompt, temperature=0.0, max_tokens=20), *(0,) * 12, kmax)
    first_drafting = next((record for record in warm.state.records if record.draft_len == kmax), None)
    assert first_drafting is not None
    text = (*prompt, *warm.state.tokens)[: first_drafting.committed_len_before]
    cold = serve(engine, request("b", text, temperature=0.0, max_tokens=8), kmax)
    assert cold.state.records[0].committed_len_before == first_drafting.committed_len_before
    assert cold.state.records[0].drafts == first_drafting.drafts


@pytest.mark.parametrize("build", [THREE_SLOTS, TREE], ids=["chain", "tree"])
@given(schedule=draft_schedules(KMAX), depth=st.integers(0, 2))
def test_b09_budget_and_truth_agree(build: Callable[[], Engine], schedule: ScriptedDraftLen, depth: int) -> None:
    """What the scheduler counted is what the device did: lengths, drafts up to the cap, pages reserved."""
    running = restart(build(), policy=schedule, readback_depth=depth)
    requests = [request(str(i), (i, 5), temperature=0.0, max_tokens=8 + 9 * i) for i in range(3)]
    last = run_plan(running, requests).finished  # check_trace compares pages with writes
    totals = running.scheduler.totals
    metrics = [last[one.request_id].state.metrics for one in requests]
    records = [record for one in requests for record in last[one.request_id].state.records]
    assert totals.num_slot_steps == len(records) == sum(m.num_steps for m in metrics)
    assert totals.num_draft_tokens == sum(len(record.drafts) for record in records)
    assert totals.num_accepted_tokens == sum(record.num_accepted for record in records)
    assert totals.num_emitted_tokens == sum(len(last[one.request_id].state.tokens) for one in requests)
    assert totals.num_drafts == sum(bool(record.drafts) for record in records)
    for metric in metrics:
        if not running.config.topology.is_tree:
            assert sum(metric.drafted_per_pos) == metric.num_draft_tokens
        assert sum(metric.accepted_per_pos) == metric.num_accepted_tokens
        assert metric.mean_acceptance_length == 1 + metric.num_accepted_tokens / max(metric.num_steps, 1)
    if depth == 0:
        # With nothing in flight the bound is the truth: the cap is exact, so every draft of it is a real one.
        assert all(len(record.drafts) == record.draft_cap for record in records)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_b16_the_gate_closes_and_opens_again_and_compiles_nothing(depth: int) -> None:
    """One refused of the last two first drafts closes the gate, every third step probes; the toy errs now and then."""
    engine = THREE_SLOTS()
    traces = engine.launcher.num_traces
    gate = AcceptanceGate(FixedDraftLen(), disable_below=0.9, window=2, probe_every=3)
    one = request("a", (3, 1, 4), temperature=0.0, max_tokens=40)
    running = restart(engine, policy=gate, readback_depth=depth)
    run = run_plan(running, [one])
    assert_plain(running, [one], run)
    lengths = run.finished["a"].state.metrics.draft_lens
    closed = lengths.index(0)
    probed = lengths.index(1, closed)
    assert set(lengths[:closed]) <= {KMAX, 1}
    assert KMAX in lengths[probed:]
    assert engine.launcher.num_traces == traces


def test_b16_speculation_off_and_on_again_compiles_nothing() -> None:
    engine = THREE_SLOTS()
    traces = engine.launcher.num_traces
    one = request("a", (1, 2), temperature=0.0, max_tokens=40)
    last = serve(engine, one, 3, 3, *(0,) * 10, 3)
    assert set(last.state.metrics.draft_lens) >= {0, 3}
    assert last.state.metrics.draft_lens[12] == 3
    assert engine.launcher.num_traces == traces
