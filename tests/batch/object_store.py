"""An object store in memory behind `gs://`: an object is there whole, once its upload is finished, or not at all."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import pytest
from etils.epath import backend as backends


class Upload(io.BytesIO):
    """Becomes an object when it is closed without a fault, as an upload does; a process that dies leaves nothing."""

    def __init__(self, store: "ObjectStore", name: str) -> None:
        super().__init__()
        self.store, self.name = store, name

    def close(self) -> None:
        if not self.closed:
            self.store.check_room(len(self.getvalue()))
            self.store.objects[self.name] = self.getvalue()
        super().close()


class ObjectStore(fsspec.AbstractFileSystem):
    """As much of a client as `epath` calls. It remembers listings until it is told to forget them, as gcsfs does."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}
        self.listings: dict[str, list[str]] = {}
        self.room: int | None = None  # bytes that may still be written

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(path).removeprefix("gs://").rstrip("/")

    def check_room(self, num_bytes: int) -> None:
        if self.room is not None and num_bytes > self.room:
            raise RuntimeError("quota exceeded")

    def invalidate_cache(self, path: str | None = None) -> None:
        self.listings.clear()

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        folder = self._strip_protocol(path) + "/"
        if folder not in self.listings:
            inside = {name[len(folder) :].partition("/")[0] for name in self.objects if name.startswith(folder)}
            self.listings[folder] = [folder + name for name in sorted(inside)]
        if not self.listings[folder] and self._strip_protocol(path) not in self.objects:
            raise FileNotFoundError(path)
        return [self.info(name) for name in self.listings[folder]] if detail else self.listings[folder]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        name = self._strip_protocol(path)
        if name in self.objects:
            return {"name": name, "size": len(self.objects[name]), "type": "file"}
        if any(other.startswith(f"{name}/") for other in self.objects):
            return {"name": name, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        name = self._strip_protocol(path)
        if "w" in mode:
            return Upload(self, name)
        if name not in self.objects:
            raise FileNotFoundError(path)
        return io.BytesIO(self.objects[name])

    def rename(self, path1: str, path2: str, **_: Any) -> None:
        """A copy appears whole; then the old one goes."""
        self.objects[self._strip_protocol(path2)] = self.objects[self._strip_protocol(path1)]
        del self.objects[self._strip_protocol(path1)]

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        name = self._strip_protocol(path)
        gone = [other for other in self.objects if other == name or (recursive and other.startswith(f"{name}/"))]
        if not gone:
            raise FileNotFoundError(path)
        for other in gone:
            del self.objects[other]


@contextmanager
def object_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """Puts one behind `gs://`."""
    store = ObjectStore()
    with monkeypatch.context() as patched:
        patched.setattr(backends._FileSystemSpecBackend, "fs", lambda self, path: store)
        yield store
