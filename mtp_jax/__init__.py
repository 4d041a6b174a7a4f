"""Multi-Token-Prediction speculative decoding in JAX: draft, verify, accept and commit in one compiled step.

Public names are loaded on first use, so that importing a host-side module does not load jax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtp_jax.core.config import SamplingParams as SamplingParams
    from mtp_jax.core.config import SpeculativeConfig as SpeculativeConfig
    from mtp_jax.core.errors import ConfigError as ConfigError
    from mtp_jax.core.errors import EngineFailed as EngineFailed
    from mtp_jax.core.errors import InvariantError as InvariantError
    from mtp_jax.llm import LLM as LLM
    from mtp_jax.outputs import CompletionOutput as CompletionOutput
    from mtp_jax.outputs import RequestOutput as RequestOutput

_HOMES = {
    "LLM": "mtp_jax.llm",
    "SamplingParams": "mtp_jax.core.config",
    "SpeculativeConfig": "mtp_jax.core.config",
    "RequestOutput": "mtp_jax.outputs",
    "CompletionOutput": "mtp_jax.outputs",
    "ConfigError": "mtp_jax.core.errors",
    "EngineFailed": "mtp_jax.core.errors",
    "InvariantError": "mtp_jax.core.errors",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mtp_jax' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
