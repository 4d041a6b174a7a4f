"""A way to draft as a user names it: declared beside its proposer, listed in `proposers.registry`."""

from collections.abc import Callable
from dataclasses import dataclass

from mtp_jax.core.config import SpeculativeConfig
from mtp_jax.models.api import ModelFamily
from mtp_jax.proposers.api import DraftProposer


@dataclass(frozen=True)
class Method:
    """What a method of `SpeculativeConfig` is: its proposer, and all that its table has to know of it.

    `build`: the proposer for a checkpoint's family.
    `options`: fields of `SpeculativeConfig` that it reads and that not every method does; it refuses the others.
    `problem`: one sentence on a checkpoint that it cannot draft for; None where it can.
    `longest`: the most drafts in a row that it makes for a checkpoint; None: as many as asked for.
    `stands_for`: another method's name, where this one means different ones for different checkpoints.
    `caveat`: one sentence to warn with, on what it does not use of a checkpoint; None where there is nothing.
    """

    build: Callable[[ModelFamily, SpeculativeConfig], DraftProposer]
    options: frozenset[str] = frozenset()
    problem: Callable[[ModelFamily, SpeculativeConfig], str | None] = lambda family, spec: None
    longest: Callable[[ModelFamily], int | None] = lambda family: None
    stands_for: Callable[[ModelFamily], str | None] = lambda family: None
    caveat: Callable[[ModelFamily, SpeculativeConfig], str | None] = lambda family, spec: None
