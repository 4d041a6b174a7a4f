"""The acceptance rules by name, one line each, and a configuration's rule with what it forces."""

from collections.abc import Callable

from mtp_jax.acceptance.api import AcceptanceRule
from mtp_jax.acceptance.match import Match
from mtp_jax.acceptance.rejection import Rejection
from mtp_jax.acceptance.synthetic import Synthetic, conditional_rates
from mtp_jax.core.config import SpeculativeConfig
from mtp_jax.core.variants import Variants

RULES: Variants[str, Callable[[SpeculativeConfig], AcceptanceRule]] = Variants(
    "acceptance",
    {
        "match": lambda spec: Match(),
        "rejection": lambda spec: Rejection(spec.block_verification),
    },
)


def rule_of(spec: SpeculativeConfig) -> AcceptanceRule:
    """The rule that a configuration names, under forced acceptance where it sets `synthetic_acceptance`."""
    rule = RULES[spec.acceptance](spec)
    if spec.synthetic_acceptance is None:
        return rule
    return Synthetic(rule, conditional_rates(spec.synthetic_acceptance))
