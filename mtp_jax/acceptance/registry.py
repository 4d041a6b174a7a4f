"""The acceptance rules by name: one line each."""

from mtp_jax.acceptance.api import AcceptanceRule
from mtp_jax.acceptance.match import Match

RULES: dict[str, AcceptanceRule] = {
    "match": Match(),
}
