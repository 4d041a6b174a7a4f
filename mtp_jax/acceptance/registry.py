"""The acceptance rules by name: one line each."""

from mtp_jax.acceptance.api import AcceptanceRule
from mtp_jax.acceptance.match import Match
from mtp_jax.core.variants import Variants

RULES: Variants[str, AcceptanceRule] = Variants(
    "acceptance",
    {
        "match": Match(),
    },
)
