"""The lines of the input files, one at a time: the whole of a large input is never in memory."""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtp_jax.core.errors import ConfigError


@dataclass(frozen=True)
class Line:
    """`number` counts from 0 over all files together."""

    number: int
    raw: bytes


def input_files(patterns: Sequence[str]) -> list[Path]:
    """The files that paths and globs name, those of a glob by name. `ConfigError` for one that names none, or twice."""
    files: list[Path] = []
    for pattern in patterns:
        found = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
        if not found:
            raise ConfigError(f"--input {pattern} names no file.")
        files += found
    for file in files:
        if not file.is_file():
            raise ConfigError(f"--input {file} is not a file.")
    if len({file.resolve() for file in files}) < len(files):
        raise ConfigError("--input names a file twice; each line has one result.")
    return files


def read_lines(files: Sequence[Path]) -> Iterator[Line]:
    """Every line of the files, an empty one too; the last may lack its newline."""
    number = 0
    for file in files:
        with file.open("rb") as opened:
            for raw in opened:
                yield Line(number, raw)
                number += 1
