"""How to draft: one file per proposer."""

from mtp_jax.proposers.api import DraftProposer as DraftProposer
from mtp_jax.proposers.registry import PROPOSERS as PROPOSERS
from mtp_jax.proposers.registry import resolve_method as resolve_method
