"""A variant is one file and one line: in its folder's table each entry stands on a line of its own."""

import ast

import pytest

from tests.architecture.repository import ROOT

TABLES = {
    "FAMILIES": "mtp_jax/models",
    "PROPOSERS": "mtp_jax/proposers",
    "RULES": "mtp_jax/acceptance",
    "POLICIES": "mtp_jax/policies",
    "BACKENDS": "kernels_pallas/paged_attention",
}


def entry_lines(source: str, table: str) -> list[tuple[int, int]] | None:
    """First and last line of each entry of the dict literal assigned to `table`; None where there is none."""
    for statement in ast.parse(source).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == table:
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if name == table:
                pass
            case _:
                continue
        literals = [node for node in ast.walk(value) if isinstance(node, ast.Dict)]
        if literals:
            keys = [key for key in literals[0].keys if key is not None]
            return [
                (key.lineno, entry.end_lineno or entry.lineno)
                for key, entry in zip(keys, literals[0].values, strict=True)
            ]
    return None


def one_line_each(entries: list[tuple[int, int]]) -> bool:
    starts = [first for first, _ in entries]
    return all(first == last for first, last in entries) and len(set(starts)) == len(starts)


@pytest.mark.parametrize(("table", "folder"), TABLES.items())
def test_each_entry_of_a_table_is_one_line(table: str, folder: str) -> None:
    found = {
        path: entries
        for path in sorted((ROOT / folder).glob("*.py"))
        if (entries := entry_lines(path.read_text(), table)) is not None
    }
    assert len(found) == 1, f"{folder} needs exactly one dict named {table}; it has {len(found)}"
    (entries,) = found.values()
    assert entries
    assert one_line_each(entries)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('RULES = {\n    "match": Match,\n    "rejection": Rejection,\n}\n', True),
        ('RULES: Mapping[str, Rule] = MappingProxyType({\n    "match": Match,\n})\n', True),
        ('RULES = {"match": Match, "rejection": Rejection}\n', False),
        ('RULES = {\n    "match": Match(\n        1,\n    ),\n}\n', False),
    ],
)
def test_the_check_tells_one_line_from_more(source: str, expected: bool) -> None:
    entries = entry_lines(source, "RULES")
    assert entries is not None
    assert one_line_each(entries) == expected
