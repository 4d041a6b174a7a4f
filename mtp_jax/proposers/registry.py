"""The proposers by method name: one line each; `resolve_method` settles names that depend on the checkpoint."""

import warnings
from collections.abc import Callable

from mtp_jax.core.config import SpeculativeConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.core.variants import Variants
from mtp_jax.models.api import ModelFamily
from mtp_jax.proposers.api import DraftProposer
from mtp_jax.proposers.mtp import mtp_eagle, mtp_vanilla
from mtp_jax.proposers.none import NoDraft

PROPOSERS: Variants[str | None, Callable[[ModelFamily, SpeculativeConfig], DraftProposer]] = Variants(
    "method",
    {
        None: lambda family, spec: NoDraft(),
        "mtp_eagle": lambda family, spec: mtp_eagle(spec.draft_sampling),  # type: ignore[arg-type]
        "mtp_vanilla": lambda family, spec: mtp_vanilla(family.num_mtp_layers, spec.draft_sampling),  # type: ignore[arg-type]
    },
)
_ANY_MTP = "mtp"
_NEEDS_MTP_LAYERS = frozenset({_ANY_MTP, "mtp_eagle", "mtp_vanilla"})


def method_names() -> tuple[str, ...]:
    """What a user may write as `method`, beside None."""
    return (_ANY_MTP, *(name for name in PROPOSERS if name is not None))


def check_method(method: str | None) -> None:
    """Raises `ConfigError` for a name that no proposer has."""
    if method is not None and method not in method_names():
        allowed = ", ".join(map(repr, method_names()))
        raise ConfigError(f"method is {method!r}; it must be None or one of {allowed}.")


def resolve_method(spec: SpeculativeConfig, family: ModelFamily) -> tuple[str | None, int]:
    """(method, Kmax) once the checkpoint is known.

    "mtp" with one MTP layer applies it recursively, at any Kmax; with more it uses one layer per draft position, and
    Kmax is limited to the layers, with a warning. A model without MTP layers is refused by methods that need them,
    and so is an unknown method.
    """
    method, max_draft_len = spec.method, spec.num_speculative_tokens
    check_method(method)
    if method is None:
        return None, 0
    num_layers = family.num_mtp_layers
    if method in _NEEDS_MTP_LAYERS and num_layers == 0:
        raise ConfigError(
            f"method {method!r} needs MTP layers and this {family.name} checkpoint has none; "
            "use speculative_config=None for plain decoding."
        )
    if method == _ANY_MTP:
        method = "mtp_eagle" if num_layers == 1 else "mtp_vanilla"
    if method == "mtp_vanilla" and max_draft_len > num_layers:
        warnings.warn(
            f"num_speculative_tokens={max_draft_len} exceeds the checkpoint's {num_layers} MTP layers, one per draft "
            f"position; drafting {num_layers} tokens a step.",
            stacklevel=2,
        )
        max_draft_len = num_layers
    return method, max_draft_len
