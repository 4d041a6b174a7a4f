"""What a request's metrics say, by hand."""

import pytest

from mtp_jax.core.config import SamplingParams
from mtp_jax.engine.requests import Request, RequestMetrics, RequestState


def test_bug_b125_rates_count_verified_drafts_and_no_bonus_token() -> None:
    """Three steps: 2 of 3 drafts accepted, 0 of 3, and one without drafts."""
    metrics = RequestMetrics()
    for draft_len, num_drafted, num_accepted in ((3, 3, 2), (3, 3, 0), (0, 0, 0)):
        metrics.count_step(draft_len, num_drafted, num_accepted, num_drafted)
    assert (metrics.num_steps, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (3, 6, 2)
    assert metrics.mean_acceptance_length == pytest.approx(1 + 2 / 3)
    assert metrics.draft_lens == [3, 3, 0]


def test_bug_b127_counts_by_position_are_unconditional_and_know_who_reached_it() -> None:
    """Ragged caps: position 2 was drafted once only, and its rate is over that one."""
    metrics = RequestMetrics()
    metrics.count_step(3, num_drafted=1, num_accepted=1, draft_depth=1)
    metrics.count_step(3, num_drafted=3, num_accepted=2, draft_depth=3)
    assert metrics.drafted_per_pos == [2, 1, 1]
    assert metrics.accepted_per_pos == [2, 1]


def test_no_step_is_plain_decoding() -> None:
    assert RequestMetrics().mean_acceptance_length == 1.0


def test_stop_ids_are_the_callers_and_the_models_without_repeats() -> None:
    params = SamplingParams(stop_token_ids=(5, 3))
    assert Request("a", (1,), params, 0, eos_token_ids=(3, 4)).stop_ids == (3, 4, 5)
    ignoring = Request("a", (1,), SamplingParams(stop_token_ids=(5, 3), ignore_eos=True), 0, eos_token_ids=(3, 4))
    assert ignoring.stop_ids == (5, 3)
    assert ignoring.held_back_ids == (5, 3, 4)  # what ends nothing comes last


@pytest.mark.parametrize(("max_tokens", "longest"), [(4, 7), (29, 32), (30, 32), (10**9, 32), (None, 32)])
def test_a_text_ends_at_max_tokens_or_with_the_engines_longest(max_tokens: int | None, longest: int) -> None:
    assert Request("a", (1, 2, 3), SamplingParams(max_tokens=max_tokens), 0).longest_text(32) == longest


def test_known_tokens_leave_the_pending_one_out() -> None:
    state = RequestState(Request("a", (1, 2), SamplingParams(), 0), limit=9)
    assert state.known_tokens == [1, 2]
    state.tokens += [7]
    assert state.known_tokens == [1, 2]
    state.tokens += [8]
    assert state.known_tokens == [1, 2, 7]
