"""Weight pytrees in Orbax's format, with a manifest that makes damage visible.

Orbax restores a data file with a flipped byte in silence and casts to whatever dtype is asked for. So a save records
the size and SHA-256 of every file, and the shape and dtype of every array; a restore checks files before Orbax sees
them, and refuses a target that differs.

    <folder>/orbax/           what Orbax wrote
    <folder>/manifest.json    written last: without it a save did not finish
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from mtp_jax.checkpoints.errors import CheckpointError
from mtp_jax.checkpoints.folders import new_folder, read_json, write_json
from mtp_jax.models.api import Weights

ARRAYS_FOLDER = "orbax"
MANIFEST_FILE = "manifest.json"
_FORMAT = 1


def save_weights(weights: Weights, folder: Path, *, overwrite: bool = False) -> None:
    """Saves a nested dict of arrays as the checkpoint `folder`, which appears whole or not at all.

    `CheckpointError` if an array holds NaN, or if `folder` exists and `overwrite` is not set.

    >>> save_weights({"norm": {"scale": jnp.ones(8)}}, Path("snapshot"))        # doctest: +SKIP
    """
    with new_folder(folder, overwrite=overwrite) as partial:
        fill_folder(weights, partial)


def fill_folder(weights: Weights, folder: Path) -> None:
    """Writes arrays and manifest into an existing folder: the part of `save_weights` between start and rename."""
    arrays = flatten(weights)
    for name, array in arrays.items():
        if jnp.issubdtype(array.dtype, jnp.floating) and bool(np.isnan(np.asarray(array)).any()):
            raise CheckpointError(f"array {name!r} holds NaN; it is not saved to {folder}.")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / ARRAYS_FOLDER).absolute(), weights)
    # Orbax notes the path it wrote to; here that name is temporary, and the manifest says that the save is complete.
    (folder / ARRAYS_FOLDER / "commit_success.txt").unlink(missing_ok=True)
    files = sorted(file for file in (folder / ARRAYS_FOLDER).rglob("*") if file.is_file())
    manifest = {
        "format": _FORMAT,
        "arrays": {name: {"shape": list(array.shape), "dtype": array.dtype.name} for name, array in arrays.items()},
        "files": {
            file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": _sha256(file)}
            for file in files
        },
    }
    write_json(folder / MANIFEST_FILE, manifest)


def restore_weights(folder: Path, *, target: Weights | None = None, verify: bool = True) -> Weights:
    """The arrays of `folder`, bit for bit.

    `target` is a nested dict of `jax.ShapeDtypeStruct` (with `sharding` where arrays shall be sharded); its names,
    shapes and dtypes must be the stored ones. None: everything as stored, on the default device. `verify=False` skips
    the checksums, which cost one more read of the files; shapes and dtypes are always checked.
    """
    stored = stored_arrays(folder)
    if target is None:
        target = unflatten(stored)
    wanted = flatten(target)
    _check_target(folder, stored, wanted)
    if verify:
        verify_files(folder)
    placed = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or _default_sharding())
        for name, leaf in wanted.items()
    }
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore((folder / ARRAYS_FOLDER).absolute(), unflatten(placed))
    except Exception as error:  # Orbax raises bare `Exception` for damaged data
        raise CheckpointError(f"{folder / ARRAYS_FOLDER} cannot be restored: {str(error).splitlines()[0]}") from error


def stored_arrays(folder: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """{"layers/0/norm": shape and dtype} as the manifest has it."""
    file = folder / MANIFEST_FILE
    arrays = _manifest(folder)["arrays"]
    try:
        return {
            name: jax.ShapeDtypeStruct(tuple(facts["shape"]), jnp.dtype(facts["dtype"]))
            for name, facts in arrays.items()
        }
    except (AttributeError, KeyError, TypeError):
        raise CheckpointError(f"{file} is damaged at 'arrays': each must state 'shape' and 'dtype'.") from None


def verify_files(folder: Path) -> None:
    """`CheckpointError`, naming the file, unless every file is what was saved."""
    for name, facts in _manifest(folder)["files"].items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing.")
        num_bytes = file.stat().st_size
        if num_bytes != facts["bytes"]:
            raise CheckpointError(f"{file} has {num_bytes} bytes; {facts['bytes']} were saved.")
        if _sha256(file) != facts["sha256"]:
            raise CheckpointError(f"{file} is damaged: its SHA-256 is not the saved one.")


def flatten(tree: Weights, prefix: str = "") -> dict[str, Any]:
    """Leaves of a nested dict by their names joined with "/"."""
    leaves: dict[str, Any] = {}
    for name, node in tree.items():
        if isinstance(node, Mapping):
            leaves |= flatten(node, f"{prefix}{name}/")
        else:
            leaves[f"{prefix}{name}"] = node
    return leaves


def unflatten(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict that `flatten` took apart."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *folders, last = name.split("/")
        node = tree
        for part in folders:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


def _check_target(folder: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name in wanted.keys() - stored.keys():
        raise CheckpointError(f"{folder} has no array {name!r}, which the target asks for.")
    for name in stored.keys() - wanted.keys():
        raise CheckpointError(f"{folder} has array {name!r}, which the target lacks.")
    for name, leaf in wanted.items():
        found = stored[name]
        if leaf.shape != found.shape:
            raise CheckpointError(f"{folder} has array {name!r} of shape {found.shape}; asked for: {leaf.shape}.")
        if leaf.dtype != found.dtype:
            raise CheckpointError(
                f"{folder} has array {name!r} in {found.dtype.name}; asked for: {leaf.dtype.name} (cast it afterwards)."
            )


def _manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST_FILE
    if (folder / ARRAYS_FOLDER).is_dir() and not file.is_file():
        raise CheckpointError(f"{file} is missing: the save did not finish.")
    manifest = read_json(file)
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != _FORMAT:
        raise CheckpointError(f"{file} has format {found!r}; this version reads format {_FORMAT}.")
    return manifest


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _default_sharding() -> SingleDeviceSharding:
    """Where new arrays go. Without it Orbax would want the devices of the process that saved."""
    return SingleDeviceSharding(jax.local_devices()[0])
