"""Whether all processes were started with the same configuration: asked once, before anything is compiled."""

import hashlib
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.core.config import EngineConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.models.api import ModelFamily

_VALUE_BYTES = 64


def check_same_everywhere(config: EngineConfig, family: ModelFamily, dtype: jnp.dtype) -> None:
    """`ConfigError` on every process, naming the first field in which two of them differ. Nothing to ask of one alone.

    Processes must agree on their number and on their devices for the question to reach them all.
    """
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    mine = {**described("", config), "model": repr(family), "dtype": str(dtype), "jax": jax.__version__}
    facts = np.stack([_encoded(name, value) for name, value in mine.items()])
    # A fixed number of rows: processes of different versions must not differ in shape, which would hang.
    rows = np.zeros((_MAX_FIELDS, facts.shape[1]), np.uint8)
    rows[: len(facts)] = facts
    problem = difference(multihost_utils.process_allgather(rows), list(mine))
    if problem is not None:
        raise ConfigError(problem)


def described(prefix: str, config: Any) -> dict[str, str]:
    """Every field of a nested configuration by its dotted name.

    >>> from mtp_jax.core.config import MeshConfig
    >>> described("", MeshConfig(data=2))
    {'data': '2', 'model': '1'}
    """
    found: dict[str, str] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        name = f"{prefix}{field.name}"
        found |= described(f"{name}.", value) if is_dataclass(value) else {name: repr(value)}
    return found


def difference(everybody_PFX: np.ndarray, names: list[str]) -> str | None:
    """A sentence on the first field that is not alike in all processes' rows."""
    for row, name in enumerate(names):
        facts = everybody_PFX[:, row]
        others = [process for process in range(len(facts)) if not np.array_equal(facts[process], facts[0])]
        if others:
            return (
                f"{name} differs between processes: {_text(facts[0])} in process 0, "
                f"{_text(facts[others[0]])} in process {others[0]}; start all of them with the same configuration."
            )
    return None


_MAX_FIELDS = 64


def _encoded(name: str, value: str) -> np.ndarray:
    """A digest of name and value, and the value's beginning for people."""
    digest = hashlib.blake2b(f"{name}={value}".encode(), digest_size=8).digest()
    shown = value.encode()[:_VALUE_BYTES]
    return np.frombuffer(digest + shown.ljust(_VALUE_BYTES, b"\0"), np.uint8)


def _text(facts_X: np.ndarray) -> str:
    return facts_X.tobytes()[8:].rstrip(b"\0").decode(errors="replace")
