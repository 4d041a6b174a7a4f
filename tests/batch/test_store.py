"""Parts: whole or not there, resumed only by the same job, whatever the number of processes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etils import epath
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.batch import storage
from mtp_jax.batch.merging import merge, shard_file, write_shard
from mtp_jax.batch.shares import Share
from mtp_jax.batch.source import input_files, read_lines
from mtp_jax.batch.store import LineSet, PartStore
from mtp_jax.core.errors import ConfigError
from tests.batch.object_store import object_store

JOB = {"model": "m", "inputs": [["a.jsonl", 10]]}


def share(index: int, count: int, **more: Any) -> Share:
    return Share(index, count, (index,), count, **more)


@pytest.fixture(params=["disk", "object store"])
def output(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[epath.Path]:
    if request.param == "disk":
        yield storage.path_of(tmp_path / "out.jsonl")
        return
    with object_store(monkeypatch):
        yield storage.path_of("gs://bucket/out.jsonl")


def values(path: epath.Path) -> list[Any]:
    return [json.loads(line)["x"] for line in storage.read_whole(path).splitlines()]


def test_results_are_merged_in_the_order_of_the_input(output: epath.Path) -> None:
    store = PartStore(output, JOB, resume=False)
    store.write([(2, {"x": "é\n"}), (0, {"x": 0})])
    store.write([])
    store.write([(1, {"x": "\ud800"})])
    assert [number in store.finished() for number in range(4)] == [True, True, True, False]
    assert store.end_share(3)
    merge(store, 3)
    assert values(output) == [0, "\ud800", "é\n"]
    assert storage.names_in(output.parent) == ["out.jsonl"]


def test_shares_end_one_by_one_and_the_last_one_merges(output: epath.Path) -> None:
    first, second = (PartStore(output, JOB, resume=False, share=share(index, 2)) for index in range(2))
    first.write([(0, {"x": 0}), (2, {"x": 2})])
    assert not first.end_share(3)
    with pytest.raises(ConfigError, match="1 lines have no result yet"):
        merge(first, 3)
    second.write([(1, {"x": 1})])
    assert second.end_share(3)
    assert first.end_share(3)  # at the same moment: both merge
    merge(second, 3)
    merge(first, 3)
    assert values(output) == [0, 1, 2]


def test_unmerged_results_are_a_file_for_each_share(output: epath.Path) -> None:
    stores = [PartStore(output, JOB, resume=False, share=share(index, 2)) for index in range(2)]
    stores[0].write([(2, {"x": 2}), (0, {"x": 0}), (1, {"x": 1})])  # an earlier run had other shares
    for store in stores:
        write_shard(store, 3)
    assert values(shard_file(output, share(0, 2))) == [0, 2]
    assert values(shard_file(output, share(1, 2))) == [1]
    assert shard_file(output, share(1, 2)).name == "out-00001-of-00002.jsonl"


def test_a_job_goes_on_with_another_number_of_processes(output: epath.Path) -> None:
    PartStore(output, JOB, resume=False, share=share(0, 2)).write([(0, {"x": 0})])
    PartStore(output, JOB, resume=False, share=share(1, 2)).write([(3, {"x": 3})])
    with pytest.raises(ConfigError, match="has results of an earlier run; go on with --resume"):
        PartStore(output, JOB, resume=False, share=share(0, 3))
    again = PartStore(output, JOB, resume=True, share=share(0, 3))
    assert [number for number in range(6) if number in again.finished()] == [0, 3]


def test_a_process_that_does_not_write_leaves_no_trace(output: epath.Path) -> None:
    store = PartStore(output, JOB, resume=False, share=share(0, 1, is_writer=False))
    store.write([(0, {"x": 0})])
    assert store.names() == ["job.json"]


def test_a_part_that_was_being_written_is_not_there(tmp_path: Path) -> None:
    output = storage.path_of(tmp_path / "out.jsonl")
    store = PartStore(output, JOB, resume=False)
    store.write([(0, {"x": 0})])
    (store.folder / f".{store.parts()[0].name}.1234.partial").write_bytes(b'1\t{"x":')
    again = PartStore(output, JOB, resume=True)
    assert len(again.finished()) == 1
    again.write([(1, {"x": 1})])
    assert len(again.parts()) == 2
    merge(again, 2)
    assert [*tmp_path.iterdir()] == [tmp_path / "out.jsonl"]


def test_a_result_that_is_there_twice_counts_once(output: epath.Path) -> None:
    store = PartStore(output, JOB, resume=False)
    store.write([(0, {"x": "first"})])
    store.write([(0, {"x": "second"}), (1, {"x": 1})])
    merge(store, 2)
    assert values(output) == ["first", 1]


def test_nothing_to_merge_is_an_empty_file(output: epath.Path) -> None:
    merge(PartStore(output, JOB, resume=False), 0)
    assert storage.read_whole(output) == b""


def test_another_job_may_not_go_on_here(output: epath.Path) -> None:
    PartStore(output, JOB, resume=False)
    with pytest.raises(ConfigError, match="has results of an earlier run; go on with --resume"):
        PartStore(output, JOB, resume=False)
    with pytest.raises(ConfigError, match="is of a run with model 'm'; this one has 'other'"):
        PartStore(output, JOB | {"model": "other"}, resume=True)
    done = output.with_name("done.jsonl")
    storage.write_whole(done, b"")
    with pytest.raises(ConfigError, match="exists already; a finished job is not run again"):
        PartStore(done, JOB, resume=True)


def test_a_disk_that_takes_no_more_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = storage.path_of(tmp_path / "out.jsonl")
    store = PartStore(output, JOB, resume=False)
    store.write([(0, {"x": 0})])

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("os.fsync", full)
        with pytest.raises(ConfigError, match="No space left on device; what is in earlier parts is safe"):
            store.write([(1, {"x": 1})])
        with pytest.raises(ConfigError, match="No space left on device; go on with --resume"):
            merge(store, 1)
    again = PartStore(output, JOB, resume=True)
    assert len(again.finished()) == 1
    again.write([(1, {"x": 1})])
    merge(again, 2)
    assert values(output) == [0, 1]


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


def test_of_a_line_that_is_too_long_only_the_beginning_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtp_jax.batch.source.LONGEST_LINE_BYTES", 4)
    (tmp_path / "a").write_bytes(b"1234567890\nxyz\n12345")
    lines = read_lines(input_files([str(tmp_path / "a")]))
    assert [line.raw for line in lines] == [b"12345", b"xyz\n", b"12345"]


@given(numbers=st.lists(st.integers(0, 300)))
def test_a_line_set_is_a_set(numbers: list[int]) -> None:
    found = LineSet()
    for number in numbers:
        found.add(number)
    assert len(found) == len({*numbers})
    assert [number for number in range(302) if number in found] == sorted({*numbers})
