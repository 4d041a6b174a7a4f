"""The lines of the input files, one at a time: the whole of a large input is never in memory."""

import glob
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from etils import epath

from mtp_jax.batch import storage
from mtp_jax.batch.lines import LONGEST_LINE_BYTES
from mtp_jax.core.errors import ConfigError

_STEP_BYTES = 1 << 20


@dataclass(frozen=True)
class Line:
    """`number` counts from 0 over all files together. Of a line that is too long `raw` is only the beginning."""

    number: int
    raw: bytes


def input_files(patterns: Sequence[str], results: Collection[epath.Path] = ()) -> list[epath.Path]:
    """The files that paths and globs name, those of a glob by name. `ConfigError` for one that names none, or twice.

    `results`: files that this very job writes. A glob does not mean them, whenever they appear.
    """
    files: list[epath.Path] = []
    own = {_same(file) for file in results}
    for pattern in patterns:
        found = storage.find(pattern)
        if glob.has_magic(pattern):
            found = [file for file in found if _same(file) not in own]
        if not found:
            raise ConfigError(f"--input {pattern} names no file.")
        files += found
    for file in files:
        if not storage.is_object_store(file) and not file.is_file():
            raise ConfigError(f"--input {file} is not a file.")
    if len({_same(file) for file in files}) < len(files):
        raise ConfigError("--input names a file twice; each line has one result.")
    return files


def _same(file: epath.Path) -> str:
    return str(file) if storage.is_object_store(file) else str(file.resolve())


def read_lines(files: Sequence[epath.Path]) -> Iterator[Line]:
    """Every line of the files, an empty one too; the last may lack its newline."""
    number = 0
    for file in files:
        with storage.told(file, "read"), storage.opened(file) as opened:
            while raw := opened.readline(LONGEST_LINE_BYTES + 1):
                if len(raw) > LONGEST_LINE_BYTES:
                    _skip_rest(opened, raw)
                yield Line(number, raw)
                number += 1


def _skip_rest(opened: IO[bytes], raw: bytes) -> None:
    while raw and not raw.endswith(b"\n"):
        raw = opened.readline(_STEP_BYTES)
