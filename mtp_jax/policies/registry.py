"""The policies by name, one line each, and a configuration's policy with its acceptance gate."""

from collections.abc import Callable, Mapping

from mtp_jax.core.config import SpeculativeConfig
from mtp_jax.core.variants import Variants
from mtp_jax.policies.api import DraftLenPolicy
from mtp_jax.policies.costs import never_dearer
from mtp_jax.policies.fixed import FixedDraftLen
from mtp_jax.policies.gate import AcceptanceGate
from mtp_jax.policies.goodput import Goodput
from mtp_jax.policies.schedule import ScheduledDraftLen

StepCosts = Mapping[tuple[int, int], float]
_PRIOR_ACCEPTANCE = 0.8

POLICIES: Variants[str, Callable[[SpeculativeConfig, StepCosts], DraftLenPolicy]] = Variants(
    "policy",
    {
        "fixed": lambda spec, costs: FixedDraftLen(),
        "schedule": lambda spec, costs: ScheduledDraftLen(tuple(sorted((spec.draft_len_schedule or {}).items()))),
        "goodput": lambda spec, costs: Goodput(never_dearer(costs), (_PRIOR_ACCEPTANCE,) * spec.num_speculative_tokens),
    },
)
NEEDS_STEP_COSTS = frozenset({"goodput"})


def policy_of(spec: SpeculativeConfig, costs: StepCosts) -> DraftLenPolicy:
    """The policy that a configuration names, behind a gate where it sets `disable_below_acceptance`.

    `costs`: seconds of a step by (slots, draft length); empty unless the policy is in `NEEDS_STEP_COSTS`.
    """
    policy = POLICIES[spec.policy](spec, costs)
    if spec.disable_below_acceptance is None:
        return policy
    return AcceptanceGate(policy, spec.disable_below_acceptance, spec.acceptance_window)
