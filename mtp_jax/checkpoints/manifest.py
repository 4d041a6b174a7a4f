"""What a save promises: size and SHA-256 of every file, shape and dtype of every array."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtp_jax.checkpoints.errors import CheckpointError
from mtp_jax.checkpoints.folders import read_json, write_json

MANIFEST_FILE = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True)
class ArrayFacts:
    """Shape and dtype name of one array."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class FileFacts:
    """Size in bytes and hexadecimal SHA-256 of one file."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, file: Path) -> "FileFacts":
        """Reads the whole file."""
        with file.open("rb") as stream:
            return cls(file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())


@dataclass(frozen=True)
class Manifest:
    """Arrays by their path ("layers/0/norm"), files by their path below the manifest's folder."""

    arrays: Mapping[str, ArrayFacts]
    files: Mapping[str, FileFacts]

    def write(self, folder: Path) -> None:
        """Writes `manifest.json`."""
        arrays = {name: asdict(facts) for name, facts in self.arrays.items()}
        files = {name: asdict(facts) for name, facts in self.files.items()}
        write_json(folder / MANIFEST_FILE, {"format": _FORMAT, "arrays": arrays, "files": files})

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """The folder's manifest; `CheckpointError` if there is none or it says too little."""
        file = folder / MANIFEST_FILE
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: this is no saved checkpoint, or its save did not finish.")
        fields = read_json(file)
        found = fields.get("format") if isinstance(fields, dict) else None
        if found != _FORMAT:
            raise CheckpointError(f"{file} has format {found!r}; this version reads format {_FORMAT}.")
        try:
            return cls(
                {name: _array_facts(facts) for name, facts in fields["arrays"].items()},
                {name: FileFacts(int(facts["bytes"]), str(facts["sha256"])) for name, facts in fields["files"].items()},
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{file} is damaged: {type(error).__name__} {error}.") from None

    def verify_files(self, folder: Path) -> None:
        """`CheckpointError`, naming the file, unless every file is what was saved."""
        for name, saved in self.files.items():
            file = folder / name
            if not file.is_file():
                raise CheckpointError(f"{file} is missing.")
            num_bytes = file.stat().st_size
            if num_bytes != saved.bytes:
                raise CheckpointError(f"{file} has {num_bytes} bytes; {saved.bytes} were saved.")
            if FileFacts.of(file) != saved:
                raise CheckpointError(f"{file} is damaged: its SHA-256 is not the saved one.")


def _array_facts(facts: Mapping[str, Any]) -> ArrayFacts:
    return ArrayFacts(tuple(int(size) for size in facts["shape"]), str(facts["dtype"]))
