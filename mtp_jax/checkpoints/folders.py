"""Model folders: where bundled ones are, what `config.json` says, and how a new one appears all at once."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mtp_jax.checkpoints.catalogue import PULLABLE
from mtp_jax.checkpoints.errors import CheckpointError

CONFIG_FILE = "config.json"


def bundled_names() -> tuple[str, ...]:
    """Names of the models that come with the project, sorted."""
    return tuple(sorted(file.parent.name for file in _bundled_root().glob(f"*/{CONFIG_FILE}")))


def bundled_path(name: str) -> Path:
    """The folder of the bundled model `name`; `CheckpointError` with the names there are for any other.

    >>> bundled_path("no-such-model")       # doctest: +ELLIPSIS
    Traceback (most recent call last):
    mtp_jax.checkpoints.errors.CheckpointError: 'no-such-model' is no bundled model; bundled: ...
    """
    if name not in bundled_names():
        raise CheckpointError(f"{name!r} is no bundled model; bundled: {_listed_names()}.")
    return _bundled_root() / name


def bundled_head(name: str) -> Path | None:
    """The folder of MTP layers that come with the project without the model they belong to; None if they do not."""
    folder = _bundled_root() / name
    return folder if folder.is_dir() else None


def pulled_path(name: str) -> Path:
    """Where `mtp-jax pull` puts a model: `mtp_jax/models` in the user's cache folder, by the XDG rule."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mtp_jax" / "models" / name


def find_model(model: str | Path) -> Path:
    """The folder that `model` means: a bundled name first, a pulled one, else a folder. A `Path` is always a folder.

    `CheckpointError` where there is neither.
    """
    if not isinstance(model, str | Path):
        raise CheckpointError(f"model is {model!r}; it must be the name of a bundled model or a folder.")
    if isinstance(model, str) and model in bundled_names():
        return bundled_path(model)
    if isinstance(model, str) and model in PULLABLE and pulled_path(model).is_dir():
        return pulled_path(model)
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if isinstance(model, str) and model in PULLABLE:
        raise CheckpointError(f"model {model!r} is not here yet; mtp-jax pull {model} fetches it.")
    found = "is a file" if folder.exists() else "does not exist"
    raise CheckpointError(
        f"model {str(model)!r} {found}; give a model folder or the name of a bundled model ({_listed_names()})."
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`."""
    fields = read_json(folder / CONFIG_FILE)
    if not isinstance(fields, dict):
        raise CheckpointError(f"{folder / CONFIG_FILE} must hold a JSON object; it holds a {type(fields).__name__}.")
    return fields


def read_json(file: Path) -> Any:
    """What a JSON file holds; `CheckpointError` if it is missing, is not JSON, or says two things of one name."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if found.setdefault(name, value) != value:
                raise CheckpointError(f"{file} has {name!r} twice: {found[name]!r} and {value!r}.")
        return found

    try:
        return json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=once)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing.") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}.") from None


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Writes `value` for people to read."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def new_folder(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to fill, beside `folder`; it takes that name when the block ends well, and is removed when it does not.

    So `folder` is either whole or absent, whenever the process dies. `CheckpointError` if it exists already, unless
    `overwrite`.
    """
    if folder.exists() and not overwrite:
        raise CheckpointError(f"{folder} exists already; remove it or pass overwrite=True.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    room = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    try:
        partial = room / "new"
        partial.mkdir()
        yield partial
        if not folder.exists():
            partial.rename(folder)
            return
        folder.rename(room / "old")
        try:
            partial.rename(folder)
        except BaseException:  # an interrupt, too, must not take the old one along with the room
            (room / "old").rename(folder)
            raise
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _bundled_root() -> Path:
    """`checkpoints/` of the repository, or its copy inside an installed package."""
    package = Path(__file__).parents[1]
    packaged = package / "_bundled"
    return packaged if packaged.is_dir() else package.parent / "checkpoints"


def _listed_names() -> str:
    return ", ".join(repr(name) for name in bundled_names()) or "none in this installation"
