"""From named checkpoint tensors to a family's weight pytree: everything used once, nothing left over."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from tqdm import tqdm

from mtp_jax.checkpoints.errors import CheckpointError
from mtp_jax.checkpoints.safetensors_io import StoredTensor
from mtp_jax.models.api import NamedTensors, TensorSpec, Weights
from mtp_jax.models.params import put
from mtp_jax.ops.placement import Placement

DTYPES = ("bfloat16", "float16", "float32")
PROGRESS_FROM_BYTES = 256 << 20
"""Smaller models load before a progress bar could be read."""


@runtime_checkable
class TensorReader(Protocol):
    """The tensors of a checkpoint by name: headers at once, data one by one. `folder` is what errors call it."""

    folder: Path
    tensors: dict[str, StoredTensor]

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor, a fresh array of plain numbers."""
        ...


def assemble(family: NamedTensors, reader: TensorReader, dtype: str, placement: Placement | None = None) -> Weights:
    """The weights of `family` from an entered reader, cast to `dtype` where the family does not pin another.

    One array at a time is read and sent to the devices of `placement`, split as its axes say (None: to the default
    device), so the host holds one array beside what the devices hold.
    `CheckpointError` for a tensor that is missing, misshapen, unknown, NaN, too large for `dtype`, or a copy that
    differs from its original.
    """
    check_names_and_shapes(family, reader)
    _compare_copies(family, reader)
    weights: dict[str, Any] = {}
    specs = family.tensors()
    for spec in tqdm(
        specs, desc="loading weights", unit="array", disable=True if reader.num_bytes < PROGRESS_FROM_BYTES else None
    ):
        wanted = spec.dtype or dtype
        arrays = [cast(reader.read(name), wanted, f"tensor {name!r} of {reader.folder}") for name in spec.sources]
        packed = spec.pack(arrays)
        whole = placement is None
        put(weights, spec.path, jnp.asarray(packed) if whole else placement.put_one(packed, split(spec, placement)))
    return weights


def split(spec: TensorSpec, placement: Placement) -> PartitionSpec:
    """How the placement's mesh splits an array."""
    return placement.rules.spec(*spec.axes)


def check_names(family: NamedTensors, names: Collection[str], folder: Path) -> None:
    """`CheckpointError` unless the names are those of the family's table, or copies, or deliberately unused."""
    used = {name for spec in family.tensors() for name in spec.sources}
    missing = [name for spec in family.tensors() for name in spec.sources if name not in names]
    if missing:
        raise CheckpointError(f"{folder} lacks {_some(missing)}, which family {family.name!r} needs.")
    copies = family.duplicates()
    ignored = [re.compile(pattern) for pattern in family.ignored_tensors()]
    unknown = [
        name
        for name in names
        if name not in used and name not in copies and not any(pattern.fullmatch(name) for pattern in ignored)
    ]
    if unknown:
        raise CheckpointError(f"{folder} has {_some(unknown)}, which family {family.name!r} does not use.")


def check_names_and_shapes(family: NamedTensors, reader: TensorReader) -> None:
    """Headers against the family's table, before any data is read."""
    check_names(family, reader.tensors, reader.folder)
    used: dict[str, tuple[int, ...]] = {}
    for spec in family.tensors():
        used |= dict(zip(spec.sources, spec.source_shapes, strict=True))
    for name, shape in used.items():
        _check_shape(reader, name, shape)
    for name, original in family.duplicates().items():
        if name in reader.tensors and original in used:
            _check_shape(reader, name, used[original])


def cast(array: np.ndarray, dtype: str, what: str) -> np.ndarray:
    """`array` in `dtype`; `CheckpointError`, naming `what`, if a finite value would become infinite."""
    wanted = jnp.dtype(dtype)
    if array.dtype == wanted:
        return array
    with np.errstate(over="ignore"):
        result = array.astype(wanted)
    if wanted.itemsize <= array.dtype.itemsize and bool((np.isinf(result) & ~np.isinf(array)).any()):
        raise too_large(what, dtype)
    return result


def too_large(what: str, dtype: str) -> CheckpointError:
    """The error of a value that `dtype` would make infinite."""
    return CheckpointError(f"{what} has values too large for {dtype}; load it as bfloat16 or float32.")


def checkpoint_dtype(config: Mapping[str, Any], weight_dtypes: Mapping[str, str]) -> str:
    """The dtype a checkpoint says it has, else the one that its tensors (name: dtype) agree on."""
    stated = {name: config[name] for name in ("dtype", "torch_dtype") if config.get(name) is not None}
    for name, value in stated.items():
        if value not in DTYPES:
            raise CheckpointError(f"config field {name!r} is {value!r}; allowed: {', '.join(map(repr, DTYPES))}.")
    found = set(stated.values()) or set(weight_dtypes.values())
    if len(found) > 1:
        where = "config fields 'dtype' and 'torch_dtype'" if stated else "the tensors"
        raise CheckpointError(f"{where} name several dtypes ({', '.join(sorted(found))}); choose one with dtype=.")
    return found.pop()


def source_dtypes(specs: tuple[TensorSpec, ...], reader: TensorReader) -> dict[str, str]:
    """Stored dtypes of the tensors whose dtype the family leaves open."""
    return {
        name: reader.tensors[name].dtype
        for spec in specs
        if spec.dtype is None
        for name in spec.sources
        if name in reader.tensors
    }


def _compare_copies(family: NamedTensors, reader: TensorReader) -> None:
    for name, original in family.duplicates().items():
        if name in reader.tensors:
            copy, first = (reader.read(each).astype(np.float32) for each in (name, original))
            if not np.array_equal(copy, first):
                raise CheckpointError(
                    f"{reader.tensors[name].file} has tensor {name!r}, which must equal {original!r} but differs."
                )


def _check_shape(reader: TensorReader, name: str, shape: tuple[int, ...]) -> None:
    stored = reader.tensors[name]
    if stored.shape != shape:
        raise CheckpointError(
            f"{stored.file} has tensor {name!r} of shape {list(stored.shape)}; the config asks for {list(shape)}."
        )


def _some(names: list[str], shown: int = 3) -> str:
    listed = ", ".join(repr(name) for name in names[:shown])
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"tensor{'s' if len(names) > 1 else ''} {listed}{more}"
