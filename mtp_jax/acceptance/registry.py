"""The acceptance rules by name, one line each, and a configuration's rule with what it forces."""

from collections.abc import Callable

from mtp_jax.acceptance.api import AcceptanceRule
from mtp_jax.acceptance.match import Match
from mtp_jax.acceptance.rejection import Rejection
from mtp_jax.acceptance.relaxed import relaxed
from mtp_jax.acceptance.synthetic import Synthetic, conditional_rates
from mtp_jax.core.config import SpeculativeConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.core.variants import Variants

RULES: Variants[str, Callable[[SpeculativeConfig], AcceptanceRule]] = Variants(
    "acceptance",
    {
        "match": lambda spec: Match(),
        "rejection": lambda spec: Rejection(spec.block_verification),
        "relaxed": lambda spec: relaxed(spec.relaxed_topk, spec.relaxed_delta),
    },
)


def rule_of(spec: SpeculativeConfig) -> AcceptanceRule:
    """The rule that a configuration names, under forced acceptance where it sets `synthetic_acceptance`.

    `ConfigError` where its drafts are trees and the rule knows chains only.

    >>> rule_of(SpeculativeConfig(acceptance="rejection"))
    Rejection(block_verification=False)
    >>> rule_of(SpeculativeConfig(method="dynamic_tree", acceptance="rejection"))
    Traceback (most recent call last):
    mtp_jax.core.errors.ConfigError: rejection acceptance takes chains of drafts, and method 'dynamic_tree' makes trees.
    """
    rule = RULES[spec.acceptance](spec)
    if spec.synthetic_acceptance is not None:
        rule = Synthetic(rule, conditional_rates(spec.synthetic_acceptance))
    if spec.topology.is_tree and not rule.takes_trees:
        name = spec.acceptance if spec.synthetic_acceptance is None else "synthetic"
        raise ConfigError(f"{name} acceptance takes chains of drafts, and method {spec.method!r} makes trees.")
    return rule
