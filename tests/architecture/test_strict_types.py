"""The host's own code is type-checked strictly: every file of its folders that does not call jax."""

import ast
import tomllib
from pathlib import Path

import pytest

from tests.architecture.repository import ROOT, sources

HOST_FOLDERS = ("mtp_jax/core", "mtp_jax/engine", "mtp_jax/policies", "mtp_jax/report")
STRICT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]["strict"]
UNTYPED = {"flax", "jax", "numpy"}


def calls_untyped_library(source: str) -> bool:
    imported = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                imported |= {alias.name.partition(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module)):
                imported.add(module.partition(".")[0])
            case _:
                pass
    return bool(imported & UNTYPED)


def is_strict(path: Path) -> bool:
    return any(path == ROOT / entry or ROOT / entry in path.parents for entry in STRICT)


@pytest.mark.parametrize("path", sources(*HOST_FOLDERS), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_host_code_is_strict(path: Path) -> None:
    if path.name == "__init__.py" or calls_untyped_library(path.read_text()):
        return
    assert is_strict(path), f"add {path.relative_to(ROOT)} to tool.pyright.strict in pyproject.toml"


@pytest.mark.parametrize("entry", STRICT)
def test_every_strict_entry_exists(entry: str) -> None:
    assert (ROOT / entry).exists()


def test_a_file_that_is_not_listed_is_seen() -> None:
    assert not calls_untyped_library("import json\nfrom mtp_jax.core import shapes\n")
    assert calls_untyped_library("import jax.numpy as jnp\n")
    assert not is_strict(ROOT / "mtp_jax/engine/unlisted.py")
