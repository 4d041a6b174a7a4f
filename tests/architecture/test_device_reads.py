"""Device values become host values in one module, ``engine/readback.py``; the launch path reads nothing.

This sees the reads that have a name. What it cannot see, such as ``int(x)``, the transfer guard sees on a GPU.
"""

import ast

import pytest

from tests.architecture.repository import ROOT, sources

READING_METHODS = {"block_until_ready", "item", "tolist"}
READING_FUNCTIONS = {"block_until_ready", "device_get"}
NUMPY_NAMES = {"np", "numpy"}

ALLOWED = {
    "mtp_jax/engine/readback.py": "the one place",
    "mtp_jax/bench/": "a benchmark waits for what it times",
    "mtp_jax/checkpoints/": "weights pass through host memory; no step is running",
    "mtp_jax/train/": "a training loop reports its loss; it is not the engine",
    "mtp_jax/testing/": "oracles and checks compare on the host",
}


def device_reads(source: str) -> list[str]:
    """Each named device read in this source, as ``line: name``."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.expr | ast.stmt))
    return [f"{node.lineno}: {name}" for node in nodes if (name := _read_by(node))]


def _read_by(node: ast.AST) -> str | None:
    match node:
        case ast.Attribute(value=ast.Name(id=module), attr="asarray") if module in NUMPY_NAMES:
            return "np.asarray"
        case ast.Attribute(attr=("device_get" | "block_until_ready") as name):
            return name
        case ast.Call(func=ast.Attribute(attr=name)) if name in READING_METHODS:
            return name
        case ast.ImportFrom(module="jax" | "numpy", names=names):
            imported = {alias.name for alias in names} & (READING_FUNCTIONS | {"asarray"})
            return ", ".join(sorted(imported)) or None
        case _:
            return None


def test_only_readback_reads_device_values() -> None:
    reads = {
        name: found
        for path in sources("mtp_jax")
        if not (name := path.relative_to(ROOT).as_posix()).startswith(tuple(ALLOWED))
        and (found := device_reads(path.read_text()))
    }
    assert not reads


@pytest.mark.parametrize("place", ALLOWED)
def test_every_exception_names_something_that_exists(place: str) -> None:
    assert (ROOT / place).exists()


@pytest.mark.parametrize(
    "read",
    [
        "jax.device_get(x)",
        "from jax import device_get",
        "x.item()",
        "x.tolist()",
        "x.block_until_ready()",
        "jax.block_until_ready(x)",
        "np.asarray(x)",
        "rows = map(np.asarray, outputs)",
        "from numpy import asarray",
    ],
)
def test_a_planted_read_is_seen(read: str) -> None:
    assert device_reads(f"x = 1\n{read}\n")


@pytest.mark.parametrize("upload", ["jax.device_put(x)", "jnp.asarray(x)", "d.items()", "x.copy_to_host_async()"])
def test_what_reads_nothing_is_not_seen(upload: str) -> None:
    assert not device_reads(upload)
