"""The notebooks: text and .ipynb are one, outputs are clean, and all of them run (`-m notebooks`; `.ci/run` does)."""

import ast
import re
from pathlib import Path

import nbformat
import pytest

from notebooks.execute import executed, notebook_of, texts

TEXTS = texts()
EVERY = pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.stem)
OF_ONE_MACHINE = re.compile(r"/(?:home|root|work|tmp|usr|opt|var|Users)/|Warning|0x[0-9a-f]{6,}")


def printed(cell: nbformat.NotebookNode) -> str:
    """What a cell says in words."""
    outputs = cell.outputs
    return "".join(
        str(output.get("text", "")) + str(output.get("data", {}).get("text/plain", "")) for output in outputs
    )


def faults(notebook: nbformat.NotebookNode) -> list[str]:
    """What should not be kept of a run: errors, warnings, names of one machine, cells out of order."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    found = []
    for number, cell in enumerate(cells, start=1):
        if cell.execution_count != number:
            found.append(f"{cell.id} has number {cell.execution_count}, not {number}")
        for output in cell.outputs:
            if output.output_type == "error" or output.get("name") == "stderr":
                found.append(f"{cell.id} ends in an error or writes to stderr")
        if match := OF_ONE_MACHINE.search(printed(cell)):
            found.append(f"{cell.id} prints {match[0]!r}")
    return found


def dead_cells(notebook: nbformat.NotebookNode) -> list[str]:
    """Code cells that show nothing and define nothing that is used after them."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    used = [{node.id for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Name)} for cell in cells]
    dead = []
    for number, cell in enumerate(cells):
        body = ast.parse(cell.source).body
        made = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        made |= {
            node.id
            for part in body
            for node in ast.walk(part)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        if not cell.outputs and not made & set().union(*used[number + 1 :]):
            dead.append(cell.id)
    return dead


@EVERY
def test_text_and_notebook_are_one(text: Path) -> None:
    notebook, expected = nbformat.read(text.with_suffix(".ipynb"), as_version=4), notebook_of(text)
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in expected.cells
    ], f"run `python notebooks/execute.py {text.stem[:2]}` again"


@EVERY
def test_outputs_are_kept_and_clean(text: Path) -> None:
    notebook = nbformat.read(text.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(notebook)
    assert faults(notebook) == []
    assert dead_cells(notebook) == []
    images = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "image/png" in str(output.get("data"))
    ]
    assert images
    assert "holds: " in "".join(printed(cell) for cell in notebook.cells if cell.cell_type == "code")


def test_all_six_are_there() -> None:
    assert [text.stem[:2] for text in TEXTS] == [f"{number:02}" for number in range(1, len(TEXTS) + 1)]
    assert len(TEXTS) >= 6


def test_faults_and_dead_cells_are_seen() -> None:
    cells = [nbformat.v4.new_code_cell("unused = 1", id="dead"), nbformat.v4.new_code_cell("print(2)", id="printing")]
    cells[0].execution_count, cells[1].execution_count = 1, 3
    cells[1].outputs = [nbformat.v4.new_output("stream", name="stderr", text="UserWarning: /home/me/a.py")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    assert faults(notebook) == [
        "printing has number 3, not 2",
        "printing ends in an error or writes to stderr",
        "printing prints 'Warning'",
    ]
    assert dead_cells(notebook) == ["dead"]


@pytest.mark.notebooks
@pytest.mark.long
@EVERY
def test_it_runs(text: Path) -> None:
    assert faults(executed(text)) == []
