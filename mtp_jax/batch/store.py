"""Results on disk while a job runs: parts that appear whole, and what of the input they answer.

    results.jsonl.parts/
        job.json            what the job is; another one may not go on here
        part-000007.jsonl   NUMBER <tab> RESULT, in the order in which they ended

A part is written beside its place, flushed to the disk and renamed: it is there whole or not at all, so a job that is
killed at any moment has lost only what was not yet in a part, and nothing is ever there twice.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from mtp_jax.core.errors import ConfigError

_JOB_FILE = "job.json"


class PartStore:
    """The parts of one output file. `ConfigError` for a disk that takes no more, and for another job's parts."""

    def __init__(self, output: Path, job: Mapping[str, Any], *, resume: bool) -> None:
        self.output = output
        self.folder = output.with_name(output.name + ".parts")
        self._next_part = 0
        if output.exists():
            raise ConfigError(f"{output} exists already; a finished job is not run again.")
        if self.folder.exists() and not resume:
            raise ConfigError(f"{self.folder} has results of an earlier run; go on with --resume, or remove it.")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._take_job(job)
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be written: {error.strerror}.") from error
        for leftover in self.folder.glob("*.partial"):
            leftover.unlink()
        self._next_part = 1 + max((int(part.stem.removeprefix("part-")) for part in self.parts()), default=-1)

    def parts(self) -> list[Path]:
        """Whole parts, the oldest first."""
        return sorted(self.folder.glob("part-*.jsonl"))

    def finished(self) -> set[int]:
        """Numbers of the lines that have a result."""
        return {number for part in self.parts() for number, _, _ in _entries(part)}

    def write(self, results: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """One more part with these (line number, result) pairs."""
        if results:
            data = b"".join(b"%d\t%s\n" % (number, _as_json(result)) for number, result in results)
            self._write_whole(self.folder / f"part-{self._next_part:06d}.jsonl", data)
            self._next_part += 1

    def merge(self) -> None:
        """All results in the order of the input as the output file, which appears whole; the parts go."""
        places = self._places()
        partial = self.output.with_name(f".{self.output.name}.partial")
        try:
            with partial.open("wb") as merged:
                opened = [part.open("rb") for part in self.parts()]
                try:
                    for part, start, length in places:
                        opened[part].seek(start)
                        merged.write(opened[part].read(length))
                finally:
                    for file in opened:
                        file.close()
                merged.flush()
                os.fsync(merged.fileno())
            partial.replace(self.output)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise ConfigError(f"{self.output} cannot be written: {error.strerror}; go on with --resume.") from error
        for part in self.parts():
            part.unlink()
        (self.folder / _JOB_FILE).unlink()
        self.folder.rmdir()

    def _places(self) -> Int64[np.ndarray, "L 3"]:
        """(part, first byte, bytes) of each result, by line number: a few bytes for each line, however long."""
        rows = [
            (number, part, start, length)
            for part, file in enumerate(self.parts())
            for number, start, length in _entries(file)
        ]
        table = np.array(rows, np.int64).reshape(-1, 4)
        _, first = np.unique(table[:, 0], return_index=True)
        return table[first, 1:]

    def _take_job(self, job: Mapping[str, Any]) -> None:
        file = self.folder / _JOB_FILE
        if not file.exists():
            self._write_whole(file, json.dumps(job, indent=2).encode())
            return
        earlier = json.loads(file.read_text())
        for name in sorted(job.keys() | earlier.keys()):
            if job.get(name) != earlier.get(name):
                raise ConfigError(
                    f"{self.folder} is of a run with {name} {earlier.get(name)!r}; this one has {job.get(name)!r}."
                )

    def _write_whole(self, file: Path, data: bytes) -> None:
        partial = file.with_name(file.name + ".partial")
        try:
            with partial.open("wb") as opened:
                opened.write(data)
                opened.flush()
                os.fsync(opened.fileno())
            partial.replace(file)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise ConfigError(
                f"{file} cannot be written: {error.strerror}; what is in earlier parts is safe, go on with --resume."
            ) from error


def _as_json(result: Mapping[str, Any]) -> bytes:
    """Text as it is, unless it holds what UTF-8 cannot write (a lone surrogate in a custom_id): then escaped."""
    try:
        return json.dumps(result, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(result).encode()


def _entries(part: Path) -> Iterator[tuple[int, int, int]]:
    """(line number, first byte of the result, its bytes with the newline) of each entry."""
    with part.open("rb") as opened:
        start = 0
        for entry in opened:
            number, tab, result = entry.partition(b"\t")
            yield int(number), start + len(number) + len(tab), len(result)
            start += len(entry)
