"""Runs notebooks: `python notebooks/execute.py [01 02 ...]` makes NN_name.ipynb, outputs included, of NN_name.py.

The text is what is edited; the .ipynb is what is read. Nothing in it depends on where or when it was made: cells have
numbers for names, and no times. Compiled programs are kept, and shared between notebooks, in `.cache/notebooks`, or
where `JAX_COMPILATION_CACHE_DIR` says.
"""

import os
import resource
import sys
import time
from pathlib import Path

import jaxlib.version
import jupytext
import nbformat

FOLDER = Path(__file__).resolve().parent
TIMEOUT_S = 900  # of one cell


def texts(*beginnings: str) -> list[Path]:
    """The notebooks' texts, in order; of those whose names begin so, if any are named."""
    return [path for path in sorted(FOLDER.glob("[0-9]*.py")) if path.name.startswith(beginnings or "")]


def notebook_of(text: Path) -> nbformat.NotebookNode:
    """A notebook without outputs."""
    notebook = jupytext.read(text, fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number:02}", {}
    notebook.metadata = nbformat.from_dict(
        {
            "jupytext": {"formats": "ipynb,py:percent"},
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def executed(text: Path) -> nbformat.NotebookNode:
    """The notebook after all of its cells. Raises `nbclient.exceptions.CellExecutionError` for one that fails."""
    from nbclient import NotebookClient  # which comparing text and notebook does without

    notebook = notebook_of(text)
    metadata = dict(notebook.metadata)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(FOLDER.parent / ".cache" / "notebooks"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(2**30))  # with a limit, processes may share it
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA remarks on slow compiles, which are the machine's affair
    if jaxlib.version.__version_info__ < (0, 11):  # its older emitter of CPU code compiles in a third of the time
        os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")
    NotebookClient(
        notebook, timeout=TIMEOUT_S, record_timing=False, resources={"metadata": {"path": str(FOLDER)}}
    ).execute()
    notebook.metadata = nbformat.from_dict(metadata)
    return notebook


def main(beginnings: list[str]) -> None:
    """Writes each notebook as it is done."""
    for text in texts(*beginnings):
        start, cpu_s = time.perf_counter(), _cpu_s()
        notebook = executed(text)
        nbformat.write(notebook, text.with_suffix(".ipynb"))
        print(f"{text.stem}: {time.perf_counter() - start:.0f} s, {_cpu_s() - cpu_s:.0f} s of a core", flush=True)


def _cpu_s() -> float:
    """Of the kernels that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main(sys.argv[1:])
