"""Whether all processes were started alike, weights included: asked once, before anything is compiled."""

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.core.config import EngineConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.models.api import ModelFamily, Weights

_VALUE_BYTES = 64


def check_same_everywhere(config: EngineConfig, family: ModelFamily, weights: Weights, dtype: jnp.dtype) -> None:
    """`ConfigError` on every process, naming the first field in which two of them differ. Nothing to ask of one alone.

    Processes must agree on their number and on their devices for the question to reach them all.
    """
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    mine = {
        **described("", config),
        "model": repr(family),
        "dtype": str(dtype),
        "jax": jax.__version__,
        "weights": checksum(weights),
    }
    facts = np.stack([_encoded(name, value) for name, value in mine.items()])
    # A fixed number of rows: processes of different versions must not differ in shape, which would hang.
    rows = np.zeros((_MAX_FIELDS, facts.shape[1]), np.uint8)
    rows[: len(facts)] = facts
    problem = difference(multihost_utils.process_allgather(rows), list(mine))
    if problem is not None:
        raise ConfigError(problem)


def checksum(weights: Weights) -> str:
    """Hexadecimal digits that follow from names, shapes, dtypes and values of the weights.

    The values are summed up on a device. Of an array that is split between processes nothing is looked at but its
    shape: each part is there once, and there is nothing to compare it with.

    >>> checksum({"a": jnp.arange(3)}) == checksum({"a": jnp.array([0, 2, 1])})
    False
    """
    digest = hashlib.blake2b(digest_size=8)
    for path, array in sorted(_leaves("", weights)):
        digest.update(f"{path} {array.shape} {array.dtype} ".encode())
        for part in _comparable_parts(array):
            digest.update(jax.device_get(_sums(part)).tobytes())
    return digest.hexdigest()


def _leaves(prefix: str, tree: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        path = f"{prefix}/{name}"
        found += _leaves(path, value) if isinstance(value, Mapping) else [(path, value)]
    return found


def _comparable_parts(array: Any) -> list[Any]:
    """Parts of an array that every process has, in the same order on each."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return [array]
    held: dict[int, set[str]] = {}  # parts by process
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        held.setdefault(device.process_index, set()).add(str(index))
    everywhere = set[str].intersection(*held.values())
    mine = {str(shard.index): shard.data for shard in array.addressable_shards}
    return [mine[index] for index in sorted(everywhere)]


@jax.jit
def _sums(array: jax.Array) -> jax.Array:
    """Two sums of the array's bits modulo 2^32, one of them weighted by the position, so that order counts."""
    bits = jax.lax.bitcast_convert_type(array, _UNSIGNED[array.dtype.itemsize]).astype(jnp.uint32).ravel()
    positions = jax.lax.iota(jnp.uint32, bits.size)
    return jnp.stack([bits.sum(dtype=jnp.uint32), (bits * (2 * positions + 1)).sum(dtype=jnp.uint32)])


_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


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
