"""Results while a job runs: parts that appear whole, what of the input they answer, and who has come to an end.

    results.jsonl.parts/
        job.json                                    what the job is; another one may not go on here
        began-00000-of-00004                        share 0 of 4 was begun
        part-00000-of-00004-1f2e3d4c-000007.jsonl   NUMBER <tab> RESULT, in the order in which they ended
        done-00000-of-00004                         every line of share 0 of 4 is in some part; lines of the input
        died-0001-00000.json                        of an engine over several processes: see `suspects`

A part is there whole or not at all, and every start of a process names its parts by a number of its own, so a job that
is killed at any moment has lost only what was not yet in a part, and nothing is ever written over. A job may go on with
another number of processes: whose result a part holds does not matter.
"""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from mtp_jax.batch import storage
from mtp_jax.batch.shares import Share
from mtp_jax.core.errors import ConfigError

JOB_FILE = "job.json"
_SAFE = "; what is in earlier parts is safe, go on with --resume"


class LineSet:
    """Line numbers, one byte each however many there are."""

    def __init__(self) -> None:
        self._is_in = bytearray()
        self._size = 0

    def add(self, number: int) -> None:
        """Adds one; it may be there already."""
        if number >= len(self._is_in):
            self._is_in.extend(bytes(max(number + 1 - len(self._is_in), len(self._is_in))))
        self._size += not self._is_in[number]
        self._is_in[number] = 1

    def __contains__(self, number: int) -> bool:
        return number < len(self._is_in) and bool(self._is_in[number])

    def __len__(self) -> int:
        return self._size


class PartStore:
    """The parts of one output file, as one process sees them.

    `ConfigError` for a disk that takes no more, for another job's parts, and for an earlier run's without `resume`.
    """

    def __init__(self, output: epath.Path, job: Mapping[str, Any], *, resume: bool, share: Share | None = None) -> None:
        self.output = output
        self.share = Share() if share is None else share
        self.folder = output.with_name(output.name + ".parts")
        self._token = uuid.uuid4().hex[:8]
        self._num_written = 0
        if storage.exists(output):
            raise ConfigError(f"{output} exists already; a finished job is not run again.")
        began = [name for name in self.names() if name.startswith("began-")]
        others = [name for name in began if not name.endswith(f"-of-{self.share.count:05d}")]
        if (self._mark("began") in began or others) and not resume:
            raise ConfigError(f"{self.folder} has results of an earlier run; go on with --resume, or remove it.")
        storage.make_folder(self.folder)
        self._take_job(job)
        if self.share.is_writer:
            storage.write_whole(self.folder / self._mark("began"), b"", _SAFE)

    def names(self) -> list[str]:
        """Of all files there are now."""
        return storage.names_in(self.folder)

    def parts(self) -> list[epath.Path]:
        """Whole parts, those of one start of a process in the order in which they were written."""
        return [self.folder / name for name in self.names() if name.startswith("part-")]

    def finished(self) -> LineSet:
        """The lines that have a result, whoever wrote it."""
        found = LineSet()
        for part in self.parts():
            for number, _, _ in entries(storage.read_whole(part)):
                found.add(number)
        return found

    def write(self, results: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """One more part with these (line number, result) pairs; nothing where another process writes this share."""
        if results and self.share.is_writer:
            data = b"".join(b"%d\t%s\n" % (number, _as_json(result)) for number, result in results)
            name = f"part-{self.share.label}-{self._token}-{self._num_written:06d}.jsonl"
            storage.write_whole(self.folder / name, data, _SAFE)
            self._num_written += 1

    def write_beside(self, name: str, data: bytes) -> None:
        """A small file of another kind beside the parts."""
        storage.write_whole(self.folder / name, data, _SAFE)

    def read_beside(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        """Such files by the beginning of their names."""
        for name in self.names():
            if name.startswith(prefix):
                yield name, storage.read_whole(self.folder / name)

    def end_share(self, num_lines: int) -> bool:
        """Says that every line of this share has a result. Whether all shares have come to their end by now.

        `num_lines`: of the whole input.
        """
        storage.write_whole(self.folder / self._mark("done"), json.dumps({"num_lines": num_lines}).encode(), _SAFE)
        count = self.share.count
        there = set(self.names())
        return all(f"done-{index:05d}-of-{count:05d}" in there for index in range(count))

    def remove(self) -> None:
        """Removes the parts and all beside them; what says which job they are of goes last."""
        for name in self.names():
            if name != JOB_FILE:
                storage.remove(self.folder / name)
        storage.remove_folder(self.folder)

    def _mark(self, what: str) -> str:
        return f"{what}-{self.share.label}"

    def _take_job(self, job: Mapping[str, Any]) -> None:
        """Other processes may be at this very line: whoever writes reads again what then stands there."""
        file = self.folder / JOB_FILE
        if not storage.exists(file):
            storage.write_whole(file, json.dumps(job, indent=2).encode(), _SAFE)
        stands = json.loads(storage.read_whole(file))
        for name in sorted(job.keys() | stands.keys()):
            if job.get(name) != stands.get(name):
                raise ConfigError(
                    f"{self.folder} is of a run with {name} {stands.get(name)!r}; this one has {job.get(name)!r}."
                )


def entries(part: bytes) -> Iterator[tuple[int, int, int]]:
    """(line number, first byte of the result, its bytes with the newline) of each entry of a part."""
    start = 0
    while start < len(part):
        end = part.index(b"\n", start) + 1
        tab = part.index(b"\t", start, end)
        yield int(part[start:tab]), tab + 1, end - tab - 1
        start = end


def _as_json(result: Mapping[str, Any]) -> bytes:
    """Text as it is, unless it holds what UTF-8 cannot write (a lone surrogate in a custom_id): then escaped."""
    try:
        return json.dumps(result, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(result).encode()
