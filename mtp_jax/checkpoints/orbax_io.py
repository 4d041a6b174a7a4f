"""Weight pytrees in Orbax's format, with a manifest that makes damage visible.

Orbax restores a data file with a flipped byte in silence and casts to whatever dtype is asked for. So a save records
the size and SHA-256 of every file, and the shape and dtype of every array; a restore checks files before Orbax sees
them, and refuses a target that differs.

    <folder>/orbax/           what Orbax wrote
    <folder>/manifest.json    written last: without it a save did not finish
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from mtp_jax.checkpoints.errors import CheckpointError, odd_number
from mtp_jax.checkpoints.folders import new_folder
from mtp_jax.checkpoints.manifest import ArrayFacts, FileFacts, Manifest
from mtp_jax.models.api import Weights

ARRAYS_FOLDER = "orbax"


def save_weights(weights: Weights, folder: Path, *, overwrite: bool = False) -> None:
    """Saves a nested dict of arrays as the checkpoint `folder`, which appears whole or not at all.

    `CheckpointError` if an array holds NaN or an infinity, or if `folder` exists and `overwrite` is not set.

    >>> save_weights({"norm": {"scale": jnp.ones(8)}}, Path("snapshot"))        # doctest: +SKIP
    """
    with new_folder(folder, overwrite=overwrite) as partial:
        fill_folder(weights, partial)


def fill_folder(weights: Weights, folder: Path) -> None:
    """Writes arrays and manifest into an existing folder: the part of `save_weights` between start and rename."""
    arrays = flatten(weights)
    for name, array in arrays.items():
        if jnp.issubdtype(array.dtype, jnp.floating) and (odd := odd_number(np.asarray(array))):
            raise CheckpointError(f"array {name!r} holds {odd}; weights must be numbers to be saved.")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / ARRAYS_FOLDER).absolute(), weights)
    # Orbax notes the path it wrote to; here that name is temporary, and the manifest says that the save is complete.
    (folder / ARRAYS_FOLDER / "commit_success.txt").unlink(missing_ok=True)
    files = sorted(file for file in (folder / ARRAYS_FOLDER).rglob("*") if file.is_file())
    manifest = Manifest(
        {name: ArrayFacts(array.shape, array.dtype.name) for name, array in arrays.items()},
        {file.relative_to(folder).as_posix(): FileFacts.of(file) for file in files},
    )
    manifest.write(folder)


def restore_weights(folder: Path, *, target: Weights | None = None, verify: bool = True) -> Weights:
    """The arrays of `folder`, bit for bit.

    `target` is a nested dict of `jax.ShapeDtypeStruct` (with `sharding` where arrays shall be sharded); its names,
    shapes and dtypes must be the stored ones. None: everything as stored, on the default device. `verify=False` skips
    the checksums, which cost one more read of the files; shapes and dtypes are always checked.
    """
    manifest = Manifest.read(folder)
    if target is None:
        wanted = {name: jax.ShapeDtypeStruct(each.shape, each.dtype) for name, each in manifest.arrays.items()}
    else:
        wanted = flatten(target)
    _check_target(folder, manifest.arrays, wanted)
    if verify:
        manifest.verify_files(folder)
    placed = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or _default_sharding())
        for name, leaf in wanted.items()
    }
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore((folder / ARRAYS_FOLDER).absolute(), unflatten(placed))
    except Exception as error:  # Orbax raises bare `Exception` for damaged data
        raise CheckpointError(f"{folder / ARRAYS_FOLDER} cannot be restored: {_first_line(error)}") from error


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


def _check_target(folder: Path, stored: Mapping[str, ArrayFacts], wanted: Mapping[str, Any]) -> None:
    for name in sorted(wanted.keys() - stored.keys()):
        raise CheckpointError(f"{folder} has no array {name!r}, which the target asks for.")
    for name in sorted(stored.keys() - wanted.keys()):
        raise CheckpointError(f"{folder} has array {name!r}, which the target lacks.")
    for name, leaf in wanted.items():
        found = stored[name]
        if leaf.shape != found.shape:
            raise CheckpointError(f"{folder} has array {name!r} of shape {found.shape}; asked for: {leaf.shape}.")
        if leaf.dtype.name != found.dtype:
            raise CheckpointError(
                f"{folder} has array {name!r} in {found.dtype}; asked for: {leaf.dtype.name} (cast it afterwards)."
            )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _default_sharding() -> SingleDeviceSharding:
    """Where new arrays go. Without it Orbax would want the devices of the process that saved."""
    return SingleDeviceSharding(jax.local_devices()[0])
