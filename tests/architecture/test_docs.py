"""What the documentation names exists. Its links are checked by `mkdocs build --strict`, which `.ci/run` runs."""

import re
from pathlib import Path

import pytest

import mtp_jax
from tests.architecture.repository import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "kernels_pallas/NOTES.md")),
    *sorted((ROOT / "checkpoints").glob("*/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOLDERS = "mtp_jax|kernels_pallas|tests|docs|checkpoints|deploy|notebooks"
PATH = re.compile(rf"`((?:{FOLDERS}|\.github)/[^`\s<>*{{}}]*)`")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)")
TITLED = re.compile(r'^```python title="([^"]+)"\n(.*?)^```', re.MULTILINE | re.DOTALL)


def missing_paths(page: Path) -> list[str]:
    """Paths from the repository's root, in backquotes, and relative links that lead nowhere."""
    text = page.read_text()
    paths = [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    return paths + [link for link in LINK.findall(text) if not (page.parent / link).exists()]


def altered_blocks(text: str) -> list[str]:
    """Titles of code blocks that are not in the file of their title, as they stand."""
    return [title for title, code in TITLED.findall(text) if code not in (ROOT / title).read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_and_quoted_code_are_there(page: Path) -> None:
    assert not missing_paths(page)
    assert not altered_blocks(page.read_text())


def test_every_public_name_has_a_reference() -> None:
    reference = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    assert [name for name in mtp_jax.__all__ if name not in reference] == []


def test_every_kernel_has_a_reference() -> None:
    page = (ROOT / "docs" / "reference" / "kernels.md").read_text()
    kernels = [file.parent.name for file in (ROOT / "kernels_pallas").glob("*/api.py")]
    assert [name for name in kernels if f"::: kernels_pallas.{name}.api" not in page] == []


def test_what_is_gone_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`mtp_jax/gone.py`, `mtp_jax/llm.py`, [a](gone.md#b), [c](https://example.org/), [d](page.md)")
    assert missing_paths(page) == ["mtp_jax/gone.py", "gone.md"]
    quoted = '```python title="mtp_jax/models/llama.py"\nQWEN2 = 2\n```\n'
    assert altered_blocks(quoted) == ["mtp_jax/models/llama.py"]
