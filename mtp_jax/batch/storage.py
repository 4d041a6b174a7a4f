"""Files of a job, on a disk or in an object store (`gs://`, `s3://`), by one small set of operations.

What is written appears whole or not at all. On a disk it is written beside its place, flushed and renamed. In an object
store one upload is whole by nature; only a file that is written piece by piece is uploaded under another name first.
"""

import glob
import io
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from etils import epath
from etils.epath import backend as backends

from mtp_jax.core.errors import ConfigError

SCHEMES: Mapping[str, str] = {"gs://": "gcsfs", "s3://": "s3fs", "az://": "adlfs"}
"""What a path may begin with, and the package that it then needs."""


def path_of(text: str | os.PathLike[str]) -> epath.Path:
    """A path from what a user wrote. `ConfigError` for a scheme that is not served."""
    scheme, mark, _ = str(text).partition("://")
    if mark and f"{scheme}://" not in SCHEMES:
        raise ConfigError(f"{text} begins with {scheme}://; a path is local, or begins with {', '.join(SCHEMES)}.")
    return epath.Path(text)


def is_object_store(path: epath.Path) -> bool:
    """Whether the path is outside of the machine's own file systems."""
    return "://" in str(path)


@contextmanager
def told(path: epath.Path, what: str, more: str = "") -> Iterator[None]:
    """Turns what goes wrong with `path` into a `ConfigError`: "PATH cannot be WHAT: reason"."""
    try:
        yield
    except FileNotFoundError:
        raise
    except ConfigError:
        raise
    except Exception as error:
        if not is_object_store(path) and not isinstance(error, OSError):
            raise
        reason = getattr(error, "strerror", None) or f"{error}"
        if isinstance(error, ImportError):
            package = next(package for scheme, package in SCHEMES.items() if str(path).startswith(scheme))
            reason = f"it needs the Python package {package}"
        raise ConfigError(f"{path} cannot be {what}: {reason}{more}.") from error


def find(pattern: str) -> list[epath.Path]:
    """The files that a path or a glob names, by name."""
    if not is_object_store(path_of(pattern)):
        return [epath.Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    path = path_of(pattern)
    with told(path, "read"):
        if not glob.has_magic(pattern):
            return [path] if path.exists() else []
        return sorted(path_of(name) for name in _backend(path).glob(str(path)))


def size_bytes(path: epath.Path) -> int:
    """How long a file is."""
    if is_object_store(path):
        with told(path, "read"):
            return path.stat().length
    return os.stat(path).st_size  # epath would look up the owner's name, which containers often lack


def names_in(folder: epath.Path) -> list[str]:
    """Names of the files in a folder, sorted; none where there is no folder. Never from a cache."""
    with told(folder, "read"):
        if is_object_store(folder):
            _forget_listings(folder)
        try:
            return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".partial"))
        except FileNotFoundError:
            return []


def exists(path: epath.Path) -> bool:
    """Whether a file is there now."""
    with told(path, "read"):
        if is_object_store(path):
            _forget_listings(path)
        return path.exists()


def read_whole(path: epath.Path) -> bytes:
    """All of a file. `FileNotFoundError` where there is none."""
    with told(path, "read"):
        return path.read_bytes()


@contextmanager
def opened(path: epath.Path) -> Iterator[IO[bytes]]:
    """A file to read line by line."""
    with path.open("rb") as file:
        # Files of object stores know no `readline(size)`.
        yield io.BufferedReader(file) if is_object_store(path) else file  # type: ignore[arg-type]


def make_folder(folder: epath.Path) -> None:
    """A folder; object stores have none and need none."""
    if not is_object_store(folder):
        with told(folder, "written"):
            folder.mkdir(parents=True, exist_ok=True)


def write_whole(path: epath.Path, data: bytes, more: str = "") -> None:
    """A file with this content; `more` is said when it cannot be written."""
    if not is_object_store(path):
        with new_file(path, more) as file:
            file.write(data)
        return
    with told(path, "written", more):
        path.write_bytes(data)


@contextmanager
def new_file(path: epath.Path, more: str = "", *, room: epath.Path | None = None) -> Iterator[IO[Any]]:
    """A file to write piece by piece, which takes its name when the block ends well and vanishes when it does not.

    `room`: the folder where it grows (of the same file system), by default its own.
    """
    partial = (path.parent if room is None else room) / f".{path.name}.{uuid.uuid4().hex[:8]}.partial"
    with told(path, "written", more):
        try:
            with partial.open("wb") as file:
                yield file
                if not is_object_store(path):
                    file.flush()
                    os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            remove(partial)
            raise


def remove(path: epath.Path) -> None:
    """Removes a file that may be gone already."""
    with told(path, "removed"):
        path.unlink(missing_ok=True)


def remove_folder(folder: epath.Path) -> None:
    """Removes a folder with what is left in it; it may be gone already."""
    with told(folder, "removed"):
        folder.rmtree(missing_ok=True)


def _backend(path: epath.Path) -> backends.Backend:
    return path._backend  # type: ignore[attr-defined]  # epath's own `glob` joins the pattern to a folder


def _forget_listings(path: epath.Path) -> None:
    """Object stores' clients remember listings; other processes have written since."""
    backend = _backend(path)
    if isinstance(backend, backends._FileSystemSpecBackend):
        backend.fs(path).invalidate_cache()
