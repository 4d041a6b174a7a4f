"""Where the sources are, and copies of them in which a test can plant a fault."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("mtp_jax", "kernels_pallas")


def sources(*folders: str) -> list[Path]:
    """Every Python file below these folders of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@dataclass(frozen=True)
class Checkout:
    """A copy of the packages and of the configuration of their checks."""

    root: Path

    def plant(self, path: str, code: str) -> None:
        """Appends code to a file of the copy, or makes the file of it."""
        target = self.root / path
        target.write_text(f"{target.read_text()}\n{code}\n" if target.exists() else code)

    def run(self, tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs a tool of this interpreter's environment in the copy."""
        command = [str(Path(sys.executable).with_name(tool)), *arguments]
        return subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=False)


def copy_to(folder: Path) -> Checkout:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return Checkout(folder)
