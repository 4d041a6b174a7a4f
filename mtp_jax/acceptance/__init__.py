"""Which drafts stand: one file per rule."""

from mtp_jax.acceptance.api import AcceptanceRule as AcceptanceRule
from mtp_jax.acceptance.registry import RULES as RULES
