"""The proposers by method name: one line each; `resolve_method` settles names that depend on the checkpoint."""

import warnings
from collections.abc import Callable

from mtp_jax.core.config import SpeculativeConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.models.api import ModelFamily
from mtp_jax.proposers.api import DraftProposer
from mtp_jax.proposers.mtp import MtpEagle, MtpVanilla
from mtp_jax.proposers.none import NoDraft

PROPOSERS: dict[str | None, Callable[[ModelFamily, SpeculativeConfig], DraftProposer]] = {
    None: lambda family, spec: NoDraft(),
    "mtp_eagle": lambda family, spec: MtpEagle(spec.draft_sampling),  # type: ignore[arg-type]
    "mtp_vanilla": lambda family, spec: MtpVanilla(family.num_mtp_layers, spec.draft_sampling),  # type: ignore[arg-type]
}


def resolve_method(spec: SpeculativeConfig, family: ModelFamily) -> tuple[str | None, int]:
    """(method, Kmax) once the checkpoint is known.

    "mtp" with one MTP layer applies it recursively, at any Kmax; with more it uses one layer per draft position, and
    Kmax is limited to the layers, with a warning. A model without MTP layers is refused.
    """
    if spec.method is None:
        return None, 0
    num_layers = family.num_mtp_layers
    if num_layers == 0:
        raise ConfigError(
            f"method {spec.method!r} needs MTP layers and this {family.name} checkpoint has none; "
            "use speculative_config=None for plain decoding."
        )
    method = spec.method
    if method == "mtp":
        method = "mtp_eagle" if num_layers == 1 else "mtp_vanilla"
    max_draft_len = spec.num_speculative_tokens
    if method == "mtp_vanilla" and max_draft_len > num_layers:
        warnings.warn(
            f"num_speculative_tokens={max_draft_len} exceeds the checkpoint's {num_layers} MTP layers, one per draft "
            f"position; drafting {num_layers} tokens a step.",
            stacklevel=2,
        )
        max_draft_len = num_layers
    return method, max_draft_len
