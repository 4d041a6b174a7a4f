"""Parts on disk: whole or not there, resumed only by the same job, merged in the order of the input."""

import json
from pathlib import Path

import pytest

from mtp_jax.batch.source import input_files, read_lines
from mtp_jax.batch.store import PartStore
from mtp_jax.core.errors import ConfigError

JOB = {"model": "m", "inputs": [["a.jsonl", 10]]}


def test_results_are_merged_in_the_order_of_the_input(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    store = PartStore(output, JOB, resume=False)
    store.write([(2, {"x": "é\n"}), (0, {"x": 0})])
    store.write([])
    store.write([(1, {"x": "\ud800"})])
    assert store.finished() == {0, 1, 2}
    store.merge()
    assert [json.loads(line)["x"] for line in output.read_text().splitlines()] == [0, "\ud800", "é\n"]
    assert [*tmp_path.iterdir()] == [output]


def test_a_part_that_was_being_written_is_not_there(tmp_path: Path) -> None:
    store = PartStore(tmp_path / "out.jsonl", JOB, resume=False)
    store.write([(0, {"x": 0})])
    (store.folder / "part-000001.jsonl.partial").write_bytes(b'1\t{"x":')
    again = PartStore(tmp_path / "out.jsonl", JOB, resume=True)
    assert again.finished() == {0}
    again.write([(1, {"x": 1})])
    assert [part.name for part in again.parts()] == ["part-000000.jsonl", "part-000001.jsonl"]


def test_a_result_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    store = PartStore(output, JOB, resume=False)
    store.write([(0, {"x": "first"})])
    store.write([(0, {"x": "second"}), (1, {"x": 1})])
    store.merge()
    assert [json.loads(line)["x"] for line in output.read_text().splitlines()] == ["first", 1]


def test_nothing_to_merge_is_an_empty_file(tmp_path: Path) -> None:
    store = PartStore(tmp_path / "out.jsonl", JOB, resume=False)
    store.merge()
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_another_job_may_not_go_on_here(tmp_path: Path) -> None:
    PartStore(tmp_path / "out.jsonl", JOB, resume=False)
    with pytest.raises(ConfigError, match="has results of an earlier run; go on with --resume"):
        PartStore(tmp_path / "out.jsonl", JOB, resume=False)
    with pytest.raises(ConfigError, match="is of a run with model 'm'; this one has 'other'"):
        PartStore(tmp_path / "out.jsonl", JOB | {"model": "other"}, resume=True)
    (tmp_path / "done.jsonl").touch()
    with pytest.raises(ConfigError, match="exists already; a finished job is not run again"):
        PartStore(tmp_path / "done.jsonl", JOB, resume=True)


def test_a_disk_that_takes_no_more_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out.jsonl"
    store = PartStore(output, JOB, resume=False)
    store.write([(0, {"x": 0})])

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("os.fsync", full)
        with pytest.raises(ConfigError, match="No space left on device; what is in earlier parts is safe"):
            store.write([(1, {"x": 1})])
        with pytest.raises(ConfigError, match="No space left on device; go on with --resume"):
            store.merge()
    again = PartStore(output, JOB, resume=True)
    assert again.finished() == {0}
    again.write([(1, {"x": 1})])
    again.merge()
    assert len(output.read_text().splitlines()) == 2


def test_every_line_of_every_file_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(b"3\n\n5")
    (tmp_path / "a.jsonl").write_bytes(b"1\r\n2\n")
    files = input_files([str(tmp_path / "*.jsonl")])
    assert [(line.number, line.raw) for line in read_lines(files)] == [
        (0, b"1\r\n"),
        (1, b"2\n"),
        (2, b"3\n"),
        (3, b"\n"),
        (4, b"5"),
    ]
    with pytest.raises(ConfigError, match="names no file"):
        input_files([str(tmp_path / "*.txt")])
    with pytest.raises(ConfigError, match="names a file twice"):
        input_files([str(tmp_path / "a.jsonl"), str(tmp_path / "*.jsonl")])
    with pytest.raises(ConfigError, match="is not a file"):
        input_files([str(tmp_path)])
