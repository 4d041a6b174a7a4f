"""The proposers by method name: one line each; `resolve_method` settles names that depend on the checkpoint."""

import warnings
from collections.abc import Callable

from mtp_jax.core.config import SpeculativeConfig
from mtp_jax.core.errors import ConfigError, InvariantError
from mtp_jax.core.topology import Tree
from mtp_jax.core.variants import Variants
from mtp_jax.models.api import ModelFamily
from mtp_jax.models.with_drafter import WithDrafter
from mtp_jax.proposers.api import DraftProposer
from mtp_jax.proposers.dynamic_tree import DynamicTree
from mtp_jax.proposers.eagle3 import eagle3
from mtp_jax.proposers.lookup_first import LookupFirst
from mtp_jax.proposers.mtp import Mtp, mtp_eagle, mtp_vanilla
from mtp_jax.proposers.ngram import PromptLookup, ngram
from mtp_jax.proposers.none import NO_DRAFT

PROPOSERS: Variants[str | None, Callable[[ModelFamily, SpeculativeConfig], DraftProposer]] = Variants(
    "method",
    {
        None: lambda family, spec: NO_DRAFT,
        "mtp_eagle": lambda family, spec: mtp_eagle(spec.draft_sampling),  # type: ignore[arg-type]
        "mtp_vanilla": lambda family, spec: mtp_vanilla(family.num_mtp_layers, spec.draft_sampling),  # type: ignore[arg-type]
        "eagle3": lambda family, spec: eagle3(spec.draft_sampling),  # type: ignore[arg-type]
        "dynamic_tree": lambda family, spec: _tree(family, spec),
        "ngram": lambda family, spec: ngram(*_match_lens(spec, shortest=2)),
        "ngram_mtp": lambda family, spec: LookupFirst(PromptLookup(*_match_lens(spec, shortest=5)), _mtp(family, spec)),
    },
)
_ANY_MTP = "mtp"
_NEEDS_MTP_LAYERS = frozenset({_ANY_MTP, "mtp_eagle", "mtp_vanilla", "ngram_mtp", "dynamic_tree"})
_NEEDS_DRAFTER = frozenset({"eagle3"})
_TAKES_DRAFTER = ("eagle3", "dynamic_tree")
_LONGEST_MATCH = 5
_METHODS_OF_OPTION = {
    "draft_sampling": (_ANY_MTP, "mtp_eagle", "mtp_vanilla", "ngram_mtp", "eagle3", "dynamic_tree"),
    "draft_vocab_size": (_ANY_MTP, "mtp_eagle", "mtp_vanilla", "ngram_mtp", "dynamic_tree"),
    "model": _TAKES_DRAFTER,
    "prompt_lookup_min": ("ngram", "ngram_mtp"),
    "prompt_lookup_max": ("ngram", "ngram_mtp"),
    "tree_topk": ("dynamic_tree",),
    "tree_nodes": ("dynamic_tree",),
}
"""Options of `SpeculativeConfig` that only some methods take, for where a user gives them."""


def method_names() -> tuple[str, ...]:
    """What a user may write as `method`, beside None."""
    return (_ANY_MTP, *(name for name in PROPOSERS if name is not None))


def check_method(spec: SpeculativeConfig) -> None:
    """Raises `ConfigError` for a method that no proposer has, and for an option that the method would ignore."""
    method = spec.method
    if method is not None and method not in method_names():
        allowed = ", ".join(map(repr, method_names()))
        raise ConfigError(f"method is {method!r}; it must be None or one of {allowed}.")
    for option, methods in _METHODS_OF_OPTION.items():
        value = spec.asked(option)
        if value is not None and method not in methods:
            raise ConfigError(
                f"{option} is {value!r}, which method {method!r} has no use for; "
                f"leave it out, or use {' or '.join(map(repr, methods))}."
            )


def resolve_method(spec: SpeculativeConfig, family: ModelFamily) -> tuple[str | None, int]:
    """(method, Kmax) once the checkpoint is known.

    "mtp" with one MTP layer applies it recursively, at any Kmax; with more it uses one layer per draft position, and
    Kmax is limited to the layers, with a warning. A model without MTP layers is refused by methods that need them, one
    without a drafter by those that need one, and so is what `check_method` refuses.
    """
    method, max_draft_len = spec.method, spec.num_speculative_tokens
    check_method(spec)
    if method is None:
        return None, 0
    num_layers, has_drafter = family.num_mtp_layers, isinstance(family, WithDrafter)
    if method in _NEEDS_MTP_LAYERS and num_layers == 0 and not (has_drafter and method in _TAKES_DRAFTER):
        raise ConfigError(
            f"method {method!r} needs MTP layers and this {family.name} checkpoint has none; "
            "use speculative_config=None for plain decoding."
        )
    if has_drafter and spec.draft_vocab_size is not None:
        raise ConfigError(
            f"draft_vocab_size is {spec.draft_vocab_size}, and the drafter has a vocabulary of its own; leave it out."
        )
    if method in _NEEDS_DRAFTER and not has_drafter:
        raise ConfigError(
            f"method {method!r} needs a drafter; give its checkpoint's folder as model of the speculative_config."
        )
    if method == _ANY_MTP:
        method = "mtp_eagle" if num_layers == 1 else "mtp_vanilla"
    is_one_per_position = method == "mtp_vanilla" or (method == "ngram_mtp" and num_layers > 1)
    if is_one_per_position and max_draft_len > num_layers:
        warnings.warn(
            f"num_speculative_tokens={max_draft_len} exceeds the checkpoint's {num_layers} MTP layers, one per draft "
            f"position; drafting {num_layers} tokens a step.",
            stacklevel=2,
        )
        max_draft_len = num_layers
    return method, max_draft_len


def _mtp(family: ModelFamily, spec: SpeculativeConfig) -> Mtp:
    """What "mtp" means for this checkpoint."""
    if family.num_mtp_layers == 1:
        return mtp_eagle(spec.draft_sampling)  # type: ignore[arg-type]
    return mtp_vanilla(family.num_mtp_layers, spec.draft_sampling)  # type: ignore[arg-type]


def _match_lens(spec: SpeculativeConfig, *, shortest: int) -> tuple[int, int]:
    """(shortest, longest) match of prompt lookup; a bound left open makes room for the one that was given."""
    low, high = spec.prompt_lookup_min, spec.prompt_lookup_max
    if low is None:
        low = shortest if high is None else min(shortest, high)
    return low, max(_LONGEST_MATCH, low) if high is None else high


def _tree(family: ModelFamily, spec: SpeculativeConfig) -> DynamicTree:
    """Over the model's drafter or, without one, over its first MTP layer, applied again and again."""
    shape = spec.topology
    if not isinstance(shape, Tree):
        raise InvariantError(f"method {spec.method!r} without a tree")
    num_tokens, base = spec.draft_vocab_size or family.vocab_size, mtp_eagle
    if isinstance(family, WithDrafter):
        num_tokens, base = family.drafter.draft_vocab_size, eagle3
    if shape.topk > num_tokens:
        raise ConfigError(f"tree_topk is {shape.topk}; there are {num_tokens} tokens to draft.")
    return DynamicTree(base(spec.draft_sampling), shape, spec.draft_sampling)  # type: ignore[arg-type]
