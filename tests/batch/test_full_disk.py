"""A file system that is full for real: the run says so, nothing is lost, and it goes on once there is room."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtp_jax.batch.merging import merge
from mtp_jax.batch.store import PartStore
from mtp_jax.core.errors import ConfigError
from tests.batch.test_run import answer, expected, results_of
from tests.batch.toy_job import good_line, run_toy_batch

NUM_LINES = 300


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 192 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=192k", "none", folder], capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(folder: Path, name: str, *, room: int) -> None:
    """Leaves so many bytes."""
    free = os.statvfs(folder)
    (folder / name).write_bytes(bytes(free.f_bavail * free.f_bsize - room))


@pytest.mark.long
def test_a_full_disk_stops_the_run_and_loses_nothing(tmp_path: Path, small_disk: Path) -> None:
    source, output = tmp_path / "in.jsonl", small_disk / "out.jsonl"
    lines = [good_line(number) for number in range(NUM_LINES)]
    source.write_bytes(b"".join(lines))
    with pytest.raises(ConfigError, match="No space left on device; what is in earlier parts is safe, go on with"):
        run_toy_batch(source, output)
    num_parts = len([*small_disk.glob("out.jsonl.parts/part-*")])
    assert num_parts > 5
    assert not [*small_disk.glob("out.jsonl.parts/.*")]
    with pytest.raises(ConfigError, match="No space left on device"):  # still full
        run_toy_batch(source, output, resume=True)

    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)

    def filled(store: PartStore, num_lines: int) -> None:
        fill(small_disk, "more", room=16 << 10)
        merge(store, num_lines)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mtp_jax.batch.run.merge", filled)  # full again once every result is there
        with pytest.raises(
            ConfigError, match=r"out\.jsonl cannot be written: No space left on device; go on with --resume"
        ):
            run_toy_batch(source, output, resume=True)
    (small_disk / "more").unlink()
    summary = run_toy_batch(source, output, resume=True)
    assert summary.num_resumed == NUM_LINES
    assert [answer(result) for result in results_of(output)] == [expected(raw.rstrip(b"\n")) for raw in lines]
