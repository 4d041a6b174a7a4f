"""The acceptance rules by name: one line each."""

from collections.abc import Callable

from mtp_jax.acceptance.api import AcceptanceRule
from mtp_jax.acceptance.match import Match
from mtp_jax.acceptance.rejection import Rejection
from mtp_jax.core.config import SpeculativeConfig
from mtp_jax.core.variants import Variants

RULES: Variants[str, Callable[[SpeculativeConfig], AcceptanceRule]] = Variants(
    "acceptance",
    {
        "match": lambda spec: Match(),
        "rejection": lambda spec: Rejection(spec.block_verification),
    },
)
