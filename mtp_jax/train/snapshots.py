"""Snapshots of a training run: saved by Orbax while it goes on, sealed with checksums, resumed from the newest sealed.

    <folder>/states/<step>/             what Orbax wrote
    <folder>/seals/<step>/manifest.json sizes and SHA-256 of those files, shapes and dtypes of the arrays

A snapshot counts once it is sealed: when the next one is about to be saved, or the run ends. One that a kill left
without its seal is removed on the next start, however whole it looks.
"""

import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from mtp_jax.checkpoints.errors import CheckpointError
from mtp_jax.checkpoints.manifest import ArrayFacts, FileFacts, Manifest


class Snapshots:
    """The newest `keep` snapshots in `folder`. A context manager: leaving it waits for the last one and seals it."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._states = (folder / "states").absolute()
        self._seals = folder.absolute() / "seals"
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self._states, options=options)
        self._unsealed: tuple[int, dict[str, ArrayFacts]] | None = None
        for step in self._manager.all_steps():
            if not self._seal_of(step).is_dir():
                self._manager.delete(step)

    def __enter__(self) -> "Snapshots":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._seal()
        finally:
            self._manager.close()

    def latest_step(self) -> int:
        """The newest snapshot's step; 0 if there is none."""
        return self._manager.latest_step() or 0

    def save(self, step: int, state: Any) -> None:
        """Begins to save; the one before is sealed first."""
        self._seal()
        self._manager.save(step, args=ocp.args.StandardSave(state))
        self._unsealed = (step, _facts(state))

    def restore(self, step: int, like: Any) -> Any:
        """The state of a step, with the shapes, dtypes and shardings of `like`.

        `CheckpointError`, naming file or array, for what is damaged, missing, or of another shape or dtype.
        """
        manifest = Manifest.read(self._seal_of(step))
        folder = self._states / str(step)
        manifest.verify_files(folder)
        wanted = _facts(like)
        for name in sorted(wanted.keys() | manifest.arrays.keys()):
            if wanted.get(name) != manifest.arrays.get(name):
                raise CheckpointError(
                    f"{folder} has {_in_words(manifest.arrays.get(name))} for array {name!r}; this run has "
                    f"{_in_words(wanted.get(name))}."
                )
        return self._manager.restore(step, args=ocp.args.StandardRestore(like))

    def _seal(self) -> None:
        self._manager.wait_until_finished()
        if self._unsealed is None:
            return
        (step, arrays), self._unsealed = self._unsealed, None
        folder = self._states / str(step)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        manifest = Manifest(arrays, {file.relative_to(folder).as_posix(): FileFacts.of(file) for file in files})
        partial = self._seals / f".{step}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        manifest.write(partial)
        partial.rename(self._seal_of(step))
        kept = {str(step) for step in self._manager.all_steps()}
        for seal in self._seals.iterdir():
            if seal.name not in kept:
                shutil.rmtree(seal)

    def _seal_of(self, step: int) -> Path:
        return self._seals / str(step)


def _facts(state: Any) -> dict[str, ArrayFacts]:
    leaves, _ = jax.tree.flatten_with_path(state)
    return {jax.tree_util.keystr(path): ArrayFacts(tuple(leaf.shape), leaf.dtype.name) for path, leaf in leaves}


def _in_words(facts: ArrayFacts | None) -> str:
    return "nothing" if facts is None else f"{facts.dtype} {list(facts.shape)}"
