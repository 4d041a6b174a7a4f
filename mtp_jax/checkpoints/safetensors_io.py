"""Reading and writing weights in Hugging Face layout: one `model.safetensors`, or shards with an index.

Headers are read first, so that a missing, misplaced or repeated tensor is an error before any data moves; data is then
read tensor by tensor, so memory never holds a second copy of the model.
"""

from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mtp_jax.checkpoints.errors import CheckpointError, odd_number
from mtp_jax.checkpoints.folders import read_json, write_json
from mtp_jax.checkpoints.fp8 import SCALE_SUFFIX, STORED_DTYPE, Block, dequantised, read_float8, scale_shape

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES: Mapping[str, str] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", STORED_DTYPE: STORED_DTYPE}
"""What weights are stored in."""
INTEGER_DTYPES: Mapping[str, str] = {"I64": "int64", "I32": "int32", "BOOL": "bool"}
"""What tables of token ids and masks are stored in."""


@dataclass(frozen=True)
class StoredTensor:
    """What a file's header says of one tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    scale: str | None = None  # tensor with the scales of a float8 one, whose `dtype` is what it is meant to become


class SafetensorsReader:
    """The tensors of a folder by name. A context manager: files are open (mapped, not read) while it is entered.

    Raises `CheckpointError` on entering if a file is missing, truncated or at odds with the index.

    >>> with SafetensorsReader(folder) as reader:       # doctest: +SKIP
    ...     reader.tensors["lm_head.weight"].shape, reader.read("lm_head.weight")
    """

    def __init__(self, folder: Path, weight_block: Block | None = None, *, integers: Collection[str] = ()) -> None:
        """`weight_block`: the block size of float8 weights, if there may be any; see `fp8`.

        `integers` names the tensors that are no weights but tables of integers.
        """
        self.folder = folder
        self._weight_block = weight_block
        self._integers = frozenset(integers)
        self._scales: dict[str, StoredTensor] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self._open_files: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "SafetensorsReader":
        with self._stack as stack:
            index = read_index(self.folder)
            for file in [self.folder / SINGLE_FILE] if index is None else _shards(self.folder, index):
                self._open_files[file] = stack.enter_context(_opened(file))
                self._take_header(file, index)
            for name, file_name in (index or {}).items():
                if name not in self.tensors or self.tensors[name].file.name != file_name:
                    raise CheckpointError(
                        f"{self.folder / file_name} has no tensor {name!r}, which {INDEX_FILE} promises."
                    )
            self._pair_scales()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._open_files.clear()

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(file.stat().st_size for file in self._open_files)

    def read(self, name: str) -> np.ndarray:
        """One tensor, a fresh array; float8 ones as float32. `CheckpointError` if it holds NaN or an infinity."""
        stored = self.tensors[name]
        if stored.scale is None or self._weight_block is None:
            return self._checked(stored, name)
        weight_RC = _finite(read_float8(stored.file, name), stored.file, name)
        scale_rc = self._checked(self._scales[stored.scale], stored.scale)
        return dequantised(weight_RC, scale_rc.astype(np.float32), self._weight_block)

    def _checked(self, stored: StoredTensor, name: str) -> np.ndarray:
        try:
            array = self._open_files[stored.file].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{stored.file} is damaged at tensor {name!r}: {error}.") from None
        return _finite(array, stored.file, name)

    def _pair_scales(self) -> None:
        """Float8 weights take their scales along; a scale without such a weight stays a tensor like any other."""
        for name, stored in list(self.tensors.items()):
            if stored.dtype != STORED_DTYPE:
                continue
            if self._weight_block is None:
                raise CheckpointError(
                    f"{stored.file} has tensor {name!r} in {STORED_DTYPE}, and the config has no quantization_config "
                    "that says how it is scaled."
                )
            scale_name = name + SCALE_SUFFIX
            scale = self.tensors.pop(scale_name, None)
            if scale is None or len(stored.shape) != 2:
                raise CheckpointError(
                    f"{stored.file} has tensor {name!r} in {STORED_DTYPE}; it must be a matrix with scales in "
                    f"{scale_name!r}."
                )
            expected = scale_shape(stored.shape, self._weight_block)
            if scale.shape != expected:
                raise CheckpointError(
                    f"{scale.file} has tensor {scale_name!r} of shape {list(scale.shape)}; a weight of shape "
                    f"{list(stored.shape)} has scales of shape {list(expected)}."
                )
            self._scales[scale_name] = scale
            self.tensors[name] = replace(stored, dtype="bfloat16", scale=scale_name)

    def _take_header(self, file: Path, index: Mapping[str, str] | None) -> None:
        opened = self._open_files[file]
        for name in opened.keys():  # noqa: SIM118 (not a mapping)
            if name in self.tensors:
                raise CheckpointError(f"tensor {name!r} is in {self.tensors[name].file} and again in {file}.")
            if index is not None and name not in index:
                raise CheckpointError(f"{file} has tensor {name!r}, which {INDEX_FILE} does not list.")
            header = opened.get_slice(name)
            dtype = header.get_dtype()
            allowed = INTEGER_DTYPES if name in self._integers else DTYPES
            if dtype not in allowed:
                raise CheckpointError(f"{file} has tensor {name!r} in {dtype}; allowed: {', '.join(allowed)}.")
            self.tensors[name] = StoredTensor(file, tuple(header.get_shape()), allowed[dtype])


def _finite(array: np.ndarray, file: Path, name: str) -> np.ndarray:
    if odd := odd_number(array):
        raise CheckpointError(f"{file} has {odd} in tensor {name!r}; weights must be numbers.")
    return array


def write_tensors(
    folder: Path, tensors: Iterable[tuple[str, np.ndarray]], *, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Writes named arrays into `folder`: one file if they fit `max_shard_bytes`, else numbered shards and an index.

    Memory holds one shard at a time. A tensor is never split.
    """
    shard: dict[str, np.ndarray] = {}
    shard_bytes, total_bytes = 0, 0
    shards: list[list[str]] = []

    def flush() -> None:
        shards.append(list(shard))
        file = folder / _part(len(shards))
        save_file(shard, file, metadata={"format": "pt"})
        file.chmod(0o644)  # the library leaves it to its owner alone
        shard.clear()

    for name, array in tensors:
        if shard and shard_bytes + array.nbytes > max_shard_bytes:
            flush()
            shard_bytes = 0
        shard[name] = np.asarray(array, order="C")
        shard_bytes += array.nbytes
        total_bytes += array.nbytes
    flush()
    if len(shards) == 1:
        (folder / _part(1)).rename(folder / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / _part(number)).rename(folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def _part(number: int) -> str:
    """A shard's name while it is not known how many there will be."""
    return f"model-{number:05d}.safetensors"


def _opened(file: Path) -> Any:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing.")
    try:
        return safe_open(file, "numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is truncated or no safetensors file: {error}.") from None


def read_index(folder: Path) -> dict[str, str] | None:
    """{tensor: file name}, or None for a folder with a single file."""
    single, file = folder / SINGLE_FILE, folder / INDEX_FILE
    if not file.is_file():
        if not single.is_file():
            other = " (pytorch_model.bin is not read; convert it)" if (folder / "pytorch_model.bin").exists() else ""
            raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{other}.")
        return None
    if single.is_file():
        raise CheckpointError(f"{folder} has both {SINGLE_FILE} and {INDEX_FILE}; keep one of them.")
    fields = read_json(file)
    weight_map = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file} has no 'weight_map' from tensors to files.")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(
                f"{file} puts tensor {name!r} into {file_name!r}; it must be a file of the same folder."
            )
    return weight_map


def _shards(folder: Path, index: Mapping[str, str]) -> list[Path]:
    for name, file_name in index.items():
        if not (folder / file_name).is_file():
            raise CheckpointError(f"{folder / file_name} is missing; {INDEX_FILE} says that it holds tensor {name!r}.")
    return sorted({folder / file_name for file_name in index.values()})
