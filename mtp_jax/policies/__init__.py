"""How many tokens to draft: one file per policy. Host arithmetic, free of jax."""

from mtp_jax.policies.api import DraftLenPolicy as DraftLenPolicy
from mtp_jax.policies.api import PolicyView as PolicyView
from mtp_jax.policies.api import StepStats as StepStats
from mtp_jax.policies.registry import POLICIES as POLICIES
from mtp_jax.policies.registry import policy_of as policy_of
