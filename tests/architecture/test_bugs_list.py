"""`tests/BUGS.md` names tests that exist, and every test that is named after a bug."""

import re

from tests.architecture.repository import ROOT

LISTED = (ROOT / "tests" / "BUGS.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`([\w/]+\.py)(?:::(\w+))?`")
ROW = re.compile(r"^\| B(\d+) \|", re.MULTILINE)


def missing(text: str) -> list[str]:
    """The tests that a text names and that are not there."""
    found: list[str] = []
    for file, test in NAMED.findall(text):
        path = ROOT / "tests" / file
        if not path.is_file():
            path = ROOT / "mtp_jax" / file  # a reason may name the code it is about
        if not path.is_file() or (test and f"def {test}(" not in path.read_text(encoding="utf-8")):
            found.append(f"{file}::{test}")
    return found


def test_every_test_that_is_named_exists() -> None:
    assert not missing(LISTED)
    assert missing("`laws/test_books.py::test_of_no_such_name`") == ["laws/test_books.py::test_of_no_such_name"]


def test_every_bug_is_listed_once() -> None:
    numbers = [int(number) for number in ROW.findall(LISTED)]
    assert numbers == sorted(set(numbers))
    named_after = {
        int(number)
        for path in (ROOT / "tests").rglob("test_*.py")
        for number in re.findall(r"def test_bug_b(\d+)_", path.read_text(encoding="utf-8"))
    }
    assert named_after <= set(numbers)
