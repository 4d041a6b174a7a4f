"""Files that appear whole, on a disk and in an object store, by the same calls."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from etils import epath

from mtp_jax.batch import storage
from mtp_jax.core.errors import ConfigError
from tests.batch.object_store import ObjectStore, object_store


@pytest.fixture(params=["disk", "object store"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[epath.Path]:
    if request.param == "disk":
        yield storage.path_of(tmp_path / "folder")
        return
    with object_store(monkeypatch):
        yield storage.path_of("gs://bucket/folder")


def test_what_is_written_is_read(folder: epath.Path) -> None:
    assert storage.names_in(folder) == []
    storage.make_folder(folder)
    storage.write_whole(folder / "b", b"1\n2")
    with storage.new_file(folder / "a") as file:
        file.write(b"x")
        file.write(b"y")
        assert storage.names_in(folder) == ["b"]
    assert storage.names_in(folder) == ["a", "b"]
    assert storage.read_whole(folder / "a") == b"xy"
    assert storage.size_bytes(folder / "b") == 3
    with storage.opened(folder / "b") as opened:
        assert [opened.readline(9), opened.readline(9), opened.readline(9)] == [b"1\n", b"2", b""]
    assert [path.name for path in storage.find(str(folder / "*"))] == ["a", "b"]
    assert storage.find(str(folder / "c")) == []
    storage.remove(folder / "a")
    storage.remove(folder / "a")
    assert storage.exists(folder / "b")
    storage.remove_folder(folder)
    storage.remove_folder(folder)
    assert not storage.exists(folder / "b")


def test_what_fails_half_way_leaves_nothing(folder: epath.Path) -> None:
    storage.make_folder(folder)
    with pytest.raises(KeyboardInterrupt), storage.new_file(folder / "a") as file:  # noqa: PT012
        file.write(b"x")
        raise KeyboardInterrupt
    assert not folder.exists() or [*folder.iterdir()] == []
    with pytest.raises(FileNotFoundError):
        storage.read_whole(folder / "a")


def test_listings_are_never_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    with object_store(monkeypatch) as store:
        folder = storage.path_of("gs://bucket/folder")
        storage.write_whole(folder / "a", b"")
        assert storage.names_in(folder) == ["a"]
        store.objects["bucket/folder/b"] = b""  # by another process
        assert storage.names_in(folder) == ["a", "b"]


def test_an_object_store_that_takes_no_more_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with object_store(monkeypatch) as store:
        store.room = 3
        path = storage.path_of("gs://bucket/a")
        with pytest.raises(ConfigError, match=r"^gs://bucket/a cannot be written: quota exceeded; so there\.$"):
            storage.write_whole(path, b"1234", "; so there")
        assert store.objects == {}


def test_paths_that_are_not_served_are_named() -> None:
    with pytest.raises(ConfigError, match=r"ftp://x begins with ftp://; a path is local, or begins with gs://"):
        storage.path_of("ftp://x")
    with pytest.raises(ConfigError, match=r"gs://bucket/x cannot be read: it needs the Python package gcsfs\."):
        storage.find("gs://bucket/x")


def test_a_store_double_behaves_as_one() -> None:
    store = ObjectStore()
    upload = store.open("gs://b/x", "wb")
    upload.write(b"1")
    assert store.objects == {}
    upload.close()
    assert store.objects == {"b/x": b"1"}
