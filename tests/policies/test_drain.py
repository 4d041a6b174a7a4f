"""A batch of 64 unequal requests drains under goodput: against every fixed draft length, on recorded step costs.

The simulation is exact (see `bench/drain.py`). `mtp-jax bench policy --save` makes a recording; each file beside this
one is named after the chip it was made on.
"""

import dataclasses
from pathlib import Path

import pytest

from mtp_jax.bench.drain import Drain, Recording, drain, unequal_lengths
from mtp_jax.core.config import SpeculativeConfig
from mtp_jax.policies.api import DraftLenPolicy
from mtp_jax.policies.registry import POLICIES
from mtp_jax.policies.schedule import ScheduledDraftLen

RECORDINGS = {file.stem: Recording.read(file) for file in sorted(Path(__file__).parent.glob("*.json"))}
LENGTHS = unequal_lengths(64, 512)
PROBE_EVERY = 64

every_recording = pytest.mark.parametrize("recording", RECORDINGS.values(), ids=RECORDINGS)


def fixed(draft_len: int) -> DraftLenPolicy:
    return ScheduledDraftLen(((len(LENGTHS), draft_len),))


def goodput(recording: Recording) -> DraftLenPolicy:
    """As an engine starts it: warm-up costs and the prior, nothing learnt."""
    spec = SpeculativeConfig(num_speculative_tokens=recording.max_draft_len, policy="goodput")
    return POLICIES["goodput"](spec, recording.warm_up_s)


def drained(recording: Recording) -> tuple[list[Drain], Drain]:
    return [drain(recording, fixed(k), LENGTHS) for k in range(recording.max_draft_len + 1)], drain(
        recording, goodput(recording), LENGTHS
    )


def scaled(recording: Recording, cost_of_a_draft: float) -> Recording:
    """The same chip with K = 0 as recorded and each draft at a share of it: cheap ones, or dear ones."""
    costs = {(slots, k): recording.seconds((slots, 0)) * (1 + cost_of_a_draft * k) for slots, k in recording.warm_up_s}
    return dataclasses.replace(recording, warm_up_s=costs, in_use_s={})


@every_recording
def test_goodput_matches_the_best_fixed_length_over_the_whole_run(recording: Recording) -> None:
    by_length, chosen = drained(recording)
    assert {sum(step.num_tokens for step in run.steps) for run in by_length} == {
        sum(step.num_tokens for step in chosen.steps)
    }
    assert chosen.seconds <= min(run.seconds for run in by_length)


@every_recording
def test_goodput_is_never_slower_than_plain_decoding_in_any_phase(recording: Recording) -> None:
    by_length, chosen = drained(recording)
    assert chosen.phases == by_length[0].phases == (64, 32, 8, 1)
    for slots in chosen.phases:
        assert chosen.tokens_per_s(slots) >= by_length[0].tokens_per_s(slots)


@every_recording
@pytest.mark.parametrize("cost_of_a_draft", [0.01, 0.1, 0.3, 2.0])
def test_goodput_matches_the_best_length_whatever_a_draft_costs(recording: Recording, cost_of_a_draft: float) -> None:
    """One K is best in every phase then, by more than the hysteresis: a fixed one is as good as can be."""
    by_length, chosen = drained(scaled(recording, cost_of_a_draft))
    assert chosen.seconds <= min(run.seconds for run in by_length)


@every_recording
@pytest.mark.parametrize("rate", [0.05, 0.0])
def test_hopeless_drafts_cost_no_more_than_the_probes_that_find_it_out(recording: Recording, rate: float) -> None:
    """A step with drafts emits no fewer tokens than one without, so the slots are never behind those of K = 0, and
    a step with fewer slots is not dearer.

    Hence: seconds <= seconds of K = 0 + (cost at K - cost at 0) of every step that drafted. Those are one step in 64,
    and of each shape that may pay by what is known the steps until its first result is read (readback depth 1: two).
    """
    rates = (rate,) * recording.max_draft_len
    plain = drain(recording, fixed(0), LENGTHS, rates=rates)
    chosen = drain(recording, goodput(recording), LENGTHS, rates=rates)
    drafting = [step for step in chosen.steps if step.draft_len > 0]
    probes = [recording.seconds((step.slots, step.draft_len)) - recording.seconds((step.slots, 0)) for step in drafting]
    assert chosen.seconds <= plain.seconds + sum(probes)
    num_shapes = len({(step.slots, step.draft_len) for step in drafting})
    assert len(drafting) <= 2 * num_shapes + -(-len(chosen.steps) // PROBE_EVERY)


@every_recording
@pytest.mark.parametrize("rates", [(0.7, 0.6, 0.5), (0.3, 0.3, 0.3)])
def test_with_any_drafter_it_is_within_two_percent_of_the_best_length(
    recording: Recording, rates: tuple[float, ...]
) -> None:
    """What a length costs in use shows only when it runs: the doubt about those that did not is worth a few steps.

    Without it the policy was 3.5% behind in two of these drains, and in one phase 17% behind K = 0.
    """
    by_length = [drain(recording, fixed(k), LENGTHS, rates=rates) for k in range(recording.max_draft_len + 1)]
    chosen = drain(recording, goodput(recording), LENGTHS, rates=rates)
    assert chosen.seconds <= 1.02 * min(run.seconds for run in by_length)
    for slots in chosen.phases:
        assert chosen.tokens_per_s(slots) >= 0.96 * by_length[0].tokens_per_s(slots)


@every_recording
@pytest.mark.parametrize(("rate", "num_tokens"), [(0.0, 1.0), (0.5, 1.5), (1.0, 2.0)])
def test_the_simulated_luck_has_the_rate_asked_for(recording: Recording, rate: float, num_tokens: float) -> None:
    """The longest request takes part in every step; 10% of its 341 steps at rate 1/2 are four standard deviations."""
    run = drain(recording, fixed(1), LENGTHS, rates=(rate,) * recording.max_draft_len)
    assert len(run.steps) == pytest.approx(LENGTHS[0] / num_tokens, rel=0.1)
