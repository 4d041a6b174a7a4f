"""A process that dies at any of its file operations: what is on the disk then is what another start goes on from.

Every operation of a whole job is tried in turn: it does not happen, and nothing after it does either, as after a kill.
Half of a file is written where the operation was a write. No engine: results are made up from their lines.
"""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from etils.epath import backend as backends

from mtp_jax.batch import run_batch
from mtp_jax.batch.merging import shard_file
from mtp_jax.outputs import CompletionOutput, RequestOutput
from tests.batch.toy_job import good_line, team_of

NUM_LINES, NUM_SHARES = 14, 2
DISK = backends._OsPathBackend


class Killed(BaseException):
    pass


class EchoEngine:
    """Answers a prompt with itself."""

    tokenizer = None

    def __init__(self, served: list[Any]) -> None:
        self.served = served

    def generate_each(self, requests: Any, *, wants_trace: bool) -> Iterator[Any]:
        for place, (prompt, _) in enumerate(requests):
            self.served.append(prompt)
            yield place, RequestOutput(f"{place}", None, prompt, [CompletionOutput(0, "", prompt, "length")])


class Dying(io.BytesIO):
    """Writes half of what it was given; the process is gone before the rest."""

    def __init__(self, path: Any) -> None:
        super().__init__()
        self.path = path

    def write(self, data: Any) -> int:
        Path(self.path).write_bytes(data[: len(data) // 2])
        raise Killed


@contextmanager
def dying_at(last: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Operation `last` and all after it raise `Killed`; those that there were."""
    done: list[str] = []

    def counted(name: str) -> Any:
        original = getattr(DISK, name)

        def operation(self: Any, path: Any, *rest: Any, **named: Any) -> Any:
            if name == "open" and "w" not in rest[0]:
                return original(self, path, *rest, **named)
            done.append(name)
            if len(done) <= last:
                return original(self, path, *rest, **named)
            if name == "open" and len(done) == last + 1:
                return Dying(path)
            raise Killed

        return operation

    with monkeypatch.context() as patched:
        for name in ("open", "replace", "remove", "rmtree", "makedirs"):
            patched.setattr(DISK, name, counted(name))
        yield done


def serve(folder: Path, share: int, served: list[Any], **more: Any) -> bool:
    summary = run_batch(
        lambda: EchoEngine(served),  # type: ignore[arg-type, return-value]
        [str(folder / "in.jsonl")],
        folder / "out.jsonl",
        model="toy",
        job={},
        team=team_of(share, NUM_SHARES),
        resume=True,
        lines_per_part=3,
        **more,
    )
    return summary.is_complete


@pytest.mark.parametrize("merged", [True, False])
def test_every_moment_is_a_good_one_to_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merged: bool) -> None:
    lines = [good_line(number) for number in range(NUM_LINES)]
    prompts = [json.loads(line)["body"]["prompt"] for line in lines]
    moment, num_operations = 0, 1
    while moment < num_operations:
        folder = tmp_path / f"{moment}"
        folder.mkdir()
        (folder / "in.jsonl").write_bytes(b"".join(lines))
        served: list[Any] = []
        with dying_at(moment, monkeypatch) as done:
            try:
                assert not serve(folder, 0, served, merged=merged)
                assert serve(folder, 1, served, merged=merged)
            except Killed:
                num_operations = max(num_operations, len(done) + 1)
            else:
                assert moment == len(done)  # it was not killed at all
                break
        num_before = len(served)
        is_complete = [serve(folder, share, served, merged=merged) for share in range(NUM_SHARES)]
        assert is_complete[-1], (moment, done)
        # What was in a part, all but the last few lines, is not run again.
        assert len(served) <= NUM_LINES + 3, (moment, num_before)
        files = [folder / "out.jsonl"]
        if not merged:
            files = [Path(shard_file(file, team_of(share, NUM_SHARES).share)) for file in files for share in range(2)]  # type: ignore[arg-type]
        answers = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        tokens = [one["response"]["body"]["choices"][0]["token_ids"] for one in answers]
        assert tokens == (prompts if merged else prompts[::2] + prompts[1::2]), (moment, done)
        assert sorted(path.name for path in folder.iterdir()) == ["in.jsonl", *sorted(file.name for file in files)]
        moment += 1
    assert moment > 25
