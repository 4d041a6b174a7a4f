"""What every draft-length policy of the table must satisfy."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.core.config import SpeculativeConfig
from mtp_jax.core.errors import InvariantError
from mtp_jax.policies import registry
from mtp_jax.policies.api import DraftLenPolicy, PolicyView, StepStats
from mtp_jax.policies.goodput import Goodput
from mtp_jax.policies.registry import NEEDS_STEP_COSTS, POLICIES

KMAX = 3
BUCKETS = (1, 8)
COSTS = {(slots, k): 1.0 + 0.25 * k for slots in BUCKETS for k in range(KMAX + 1)}


GATED = [f"gated {name}" for name in POLICIES]


def policy_of(name: str) -> DraftLenPolicy:
    """By name; "gated ..." is the same policy behind an acceptance gate."""
    policy = name.removeprefix("gated ")
    spec = SpeculativeConfig(
        num_speculative_tokens=KMAX,
        policy=policy,
        draft_len_schedule={2: KMAX, 8: 1} if policy == "schedule" else None,
        **({"disable_below_acceptance": 0.3, "acceptance_window": 8} if name in GATED else {}),
    )
    return registry.policy_of(spec, COSTS)


def view(number: int, num_decoding: int = 1, max_draft_len: int = KMAX) -> PolicyView:
    bucket = next(bucket for bucket in BUCKETS if bucket >= num_decoding)
    return PolicyView(num_decoding, bucket, max_draft_len, number)


@st.composite
def stats(draw: st.DrawFn) -> StepStats:
    """A finished step: counts fall with the position, and no more are accepted than drafted."""
    draft_len = draw(st.integers(0, KMAX))
    bucket = draw(st.sampled_from(BUCKETS))
    drafted = tuple(sorted(draw(st.lists(st.integers(1, bucket), max_size=draft_len)), reverse=True))
    accepted = []
    left = bucket
    for count in drafted:
        left = draw(st.integers(0, min(left, count)))
        accepted.append(left)
    return StepStats(bucket, draft_len, drafted, tuple(accepted))


@pytest.mark.parametrize("name", [*POLICIES, *GATED])
@given(history=st.lists(stats(), max_size=30), num_decoding=st.integers(1, 8))
def test_lengths_stay_in_range_and_follow_from_the_history_alone(
    name: str, history: list[StepStats], num_decoding: int
) -> None:
    left, right = policy_of(name), policy_of(name)
    for number, step in enumerate(history):
        before = copy.deepcopy(left)
        chosen = left.choose(view(number, num_decoding))
        assert 0 <= chosen <= KMAX
        assert chosen == right.choose(view(number, num_decoding))
        updated = left.update(step)
        assert left == before  # `update` returns a new policy
        left, right = updated, right.update(step)


@pytest.mark.parametrize("name", [*POLICIES, *GATED])
def test_drafting_comes_back_after_good_news(name: str) -> None:
    """Two hundred steps of refused drafts, then drafts are right again whenever the policy makes some."""
    policy = policy_of(name)
    chosen = 0
    for number in range(800):
        chosen = policy.choose(view(number))
        right = 1 if number >= 200 else 0
        policy = policy.update(StepStats(1, chosen, (1,) * chosen, (right,) * chosen))
    assert chosen > 0


def test_the_schedule_counts_its_bounds_in_and_ends_in_zero() -> None:
    policy = policy_of("schedule")
    assert [policy.choose(view(0, n)) for n in (1, 2, 3, 8)] == [3, 3, 1, 1]
    assert policy.choose(PolicyView(9, 16, KMAX, 0)) == 0


def test_fixed_is_always_the_longest() -> None:
    assert [policy_of("fixed").choose(view(n, max_draft_len=k)) for n, k in ((0, 3), (7, 1), (9, 0))] == [3, 1, 0]


@pytest.mark.parametrize("name", POLICIES)
def test_the_policies_that_need_step_costs_are_named(name: str) -> None:
    assert isinstance(policy_of(name), Goodput) == (name in NEEDS_STEP_COSTS)


@pytest.mark.parametrize(
    ("cost_of_a_draft", "rate", "best"),
    [(0.0, 0.5, 3), (10.0, 1.0, 0), (0.25, 0.0, 0), (0.25, 1.0, 3), (0.45, 0.5, 1)],
)
def test_goodput_takes_the_length_that_earns_most(cost_of_a_draft: float, rate: float, best: int) -> None:
    """By hand, for one of them: cost 1 + 0.45 K, rate 0.5: 1, 1.5/1.45, 1.75/1.9, 1.875/2.35 tokens a second."""
    costs = {(1, k): 1 + cost_of_a_draft * k for k in range(KMAX + 1)}
    assert Goodput(costs, (rate,) * KMAX).best_len(1, KMAX) == best


def test_goodput_stops_drafting_that_does_not_pay_and_probes_now_and_then() -> None:
    policy = policy_of("goodput")
    lengths = []
    for number in range(400):
        lengths.append(policy.choose(view(number)))
        policy = policy.update(StepStats(1, lengths[-1], (1,) * lengths[-1], (0,) * lengths[-1]))
    assert lengths[0] == KMAX
    assert lengths[-128:].count(KMAX) == 2  # one in 64
    assert lengths[-128:].count(0) == 126


def test_goodput_without_a_measured_cost_is_our_fault() -> None:
    with pytest.raises(InvariantError, match="no step cost"):
        Goodput({}, (0.5,)).choose(PolicyView(1, 1, 1, 0))
