"""The README's file tree is what is on disk.

The tree is the fenced block after ``<!-- tree -->``: one path a line, indented under its folder, folders ending in "/",
a description after two spaces or more. A folder with lines under it lists all of its files, bar ``__init__.py`` and the
notebooks that are made of the texts beside them.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from tests.architecture.repository import ROOT

TREE = re.compile(r"^<!-- tree -->\n```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINE = re.compile(r"(?P<indent>[ │├└─|`-]*)(?P<name>[^\s│├└─]+)")
IGNORED = re.compile(r"__init__\.py|__pycache__|\..*|_version\.py|.*\.egg-info|.*\.ipynb")


def paths_in(tree: str) -> list[str]:
    """The paths that a tree lists, from the repository's root."""
    open_folders: list[tuple[int, str]] = []
    paths = []
    for line in filter(str.strip, tree.splitlines()):
        match = LINE.match(line)
        assert match is not None, f"not a line of a tree: {line!r}"
        indent, name = len(match["indent"]), match["name"]
        while open_folders and open_folders[-1][0] >= indent:
            open_folders.pop()
        path = (open_folders[-1][1] if open_folders else "") + name
        paths.append(path)
        if name.endswith("/"):
            open_folders.append((indent, path))
    return paths


def unlisted(root: Path, listed: Iterable[str]) -> list[str]:
    """What is in a folder that the tree opens, and not in the tree."""
    listed = set(listed)
    opened = {path for path in listed if path.endswith("/") and any(p != path and p.startswith(path) for p in listed)}
    on_disk = {
        f"{folder}{entry.name}" + ("/" if entry.is_dir() else "")
        for folder in opened
        for entry in (root / folder).iterdir()
        if not IGNORED.fullmatch(entry.name)
    }
    covered = {f"{parent}/" for path in listed for parent in Path(path).parents}
    return sorted(on_disk - listed - covered)


def test_readme_tree_equals_disk() -> None:
    trees = TREE.findall((ROOT / "README.md").read_text())
    assert trees, "the README shows no tree after its tree marker"
    listed = [path for tree in trees for path in paths_in(tree)]
    missing = [path for path in listed if (ROOT / path).is_dir() != path.endswith("/") or not (ROOT / path).exists()]
    assert not missing
    assert not unlisted(ROOT, listed)


def test_a_tree_is_read_with_or_without_branches() -> None:
    expected = ["mtp_jax/", "mtp_jax/core/", "mtp_jax/core/config.py", "mtp_jax/llm.py"]
    assert paths_in("mtp_jax/\n  core/   data\n    config.py  options\n  llm.py") == expected
    assert paths_in("mtp_jax/\n├── core/   data\n│   └── config.py  options\n└── llm.py") == expected


def test_an_unlisted_file_is_seen(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    for name in ("listed.py", "forgotten.py", "__init__.py"):
        (tmp_path / "core" / name).touch()
    assert unlisted(tmp_path, ["core/", "core/listed.py"]) == ["core/forgotten.py"]
    assert unlisted(tmp_path, ["core/"]) == []
