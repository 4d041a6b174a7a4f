"""The methods to draft by name: one line each, and what they mean once the checkpoint is known."""

import warnings

from mtp_jax.core.config import SpeculativeConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.core.variants import Variants
from mtp_jax.models.api import ModelFamily
from mtp_jax.proposers.dynamic_tree import DYNAMIC_TREE
from mtp_jax.proposers.eagle3 import EAGLE3
from mtp_jax.proposers.lookup_first import NGRAM_MTP
from mtp_jax.proposers.method import Method
from mtp_jax.proposers.mtp import MTP, MTP_EAGLE, MTP_VANILLA
from mtp_jax.proposers.ngram import NGRAM
from mtp_jax.proposers.none import PLAIN

PROPOSERS: Variants[str | None, Method] = Variants(
    "method",
    {
        None: PLAIN,
        "mtp": MTP,
        "mtp_eagle": MTP_EAGLE,
        "mtp_vanilla": MTP_VANILLA,
        "eagle3": EAGLE3,
        "dynamic_tree": DYNAMIC_TREE,
        "ngram": NGRAM,
        "ngram_mtp": NGRAM_MTP,
    },
)


def method_names() -> tuple[str, ...]:
    """What a user may write as `method`, beside None.

    >>> "ngram" in method_names()
    True
    """
    return tuple(name for name in PROPOSERS if name is not None)


def check_method(spec: SpeculativeConfig) -> None:
    """Raises `ConfigError` for a method that no proposer has, and for an option that the method would ignore.

    >>> check_method(SpeculativeConfig(method="eagle3", draft_vocab_size=8))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    mtp_jax.core.errors.ConfigError: draft_vocab_size is 8, which method 'eagle3' has no use for; leave it out, or ...
    """
    method = spec.method
    if method not in PROPOSERS:
        allowed = ", ".join(map(repr, method_names()))
        raise ConfigError(f"method is {method!r}; it must be None or one of {allowed}.")
    taken = PROPOSERS[method].options
    for option in sorted(frozenset().union(*(other.options for other in PROPOSERS.values())) - taken):
        value = spec.asked(option)
        if value is not None:
            takers = " or ".join(repr(name) for name, other in PROPOSERS.items() if option in other.options)
            raise ConfigError(
                f"{option} is {value!r}, which method {method!r} has no use for; leave it out, or use {takers}."
            )


def resolve_method(spec: SpeculativeConfig, family: ModelFamily) -> tuple[str | None, int]:
    """(method, Kmax) once the checkpoint is known.

    "mtp" with one MTP layer applies it recursively, at any Kmax; with more it uses one layer per draft position, and
    Kmax is limited to the layers, with a warning. Raises `ConfigError` for what `check_method` refuses, and for a
    checkpoint that lacks what the method needs.

    >>> from mtp_jax.testing.toy_family import ToyFamily
    >>> resolve_method(SpeculativeConfig(), ToyFamily(num_mtp_layers=1))
    ('mtp_eagle', 3)
    >>> resolve_method(SpeculativeConfig(), ToyFamily(num_mtp_layers=0))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    mtp_jax.core.errors.ConfigError: method 'mtp' needs MTP layers and this toy checkpoint has none; use ...
    """
    check_method(spec)
    asked, max_draft_len = PROPOSERS[spec.method], spec.num_speculative_tokens
    problem = asked.problem(family, spec)
    if problem is not None:
        raise ConfigError(problem)
    caveat = asked.caveat(family, spec)
    if caveat is not None:
        warnings.warn(caveat, stacklevel=2)
    longest = asked.longest(family)
    if longest is not None and max_draft_len > longest:
        warnings.warn(
            f"num_speculative_tokens={max_draft_len} exceeds the checkpoint's {longest} MTP layers, one per draft "
            f"position; drafting {longest} tokens a step.",
            stacklevel=2,
        )
        max_draft_len = longest
    return asked.stands_for(family) or spec.method, max_draft_len
