"""Device values become host values in one module, ``engine/readback.py``; the launch path reads nothing.

Reads that have a name are looked for everywhere. On the way to a launch nothing may read under a name that also means
something else: ``int(x)``, ``bool(x)``, ``float(x)`` and numpy's functions are refused there but for the calls listed
here, whose arguments are host values. What no source shows, such as ``if x:``, the transfer guard sees on a GPU.
"""

import ast

import pytest

from tests.architecture.repository import ROOT, sources

READING_METHODS = {"block_until_ready", "item", "tolist"}
READING_FUNCTIONS = {"block_until_ready", "device_get"}
NUMPY_NAMES = {"np", "numpy"}

ALLOWED = {
    "mtp_jax/engine/readback.py": "the one place",
    "mtp_jax/engine/consensus.py": "asked once, before anything is compiled",
    "mtp_jax/bench/": "a benchmark waits for what it times",
    "mtp_jax/checkpoints/": "weights pass through host memory; no step is running",
    "mtp_jax/train/": "a training loop reports its loss; it is not the engine",
    "mtp_jax/testing/": "oracles and checks compare on the host",
}


LAUNCH_PATH = ("mtp_jax/engine/engine.py", "mtp_jax/engine/launch.py", "mtp_jax/engine/batch.py", "mtp_jax/step/run.py")
CONVERSIONS = {"int", "bool", "float", "complex", "list", "tuple"}
FRESH_ARRAYS = {"zeros", "full"}
OF_HOST_VALUES = {
    "mtp_jax/engine/engine.py": {"bool(self._refused)"},
    "mtp_jax/engine/batch.py": {
        "int(decision.is_first)",
        "int(decision.is_last)",
        "int(bool(decision.scored))",
        "bool(decision.scored)",
        "list(facts)",
        "list(facts.values())",
        "list(integers)",
        "list(integers.values())",
        "list(floats)",
        "list(floats.values())",
        "list(bias)",
        "list(bias.values())",
        "list(_IDLE)",
        "list(_IDLE.values())",
        "int(_float_bits([1.0])[0])",
        "np.array(values, np.float32)",
        "np.array([request.seed >> 32, request.seed & 4294967295], np.uint32)",
        "np.array_equal(last.packed_BX, packed)",
    },
}


def hidden_reads(source: str) -> list[str]:
    """Calls in this source that read whatever array they are given, and functions that would, handed to another."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and (_reads_hidden(node.func) or any(map(_reads_hidden, _handed_on(node)))):
            found.append(ast.unparse(node))
    return found


def _reads_hidden(node: ast.expr) -> bool:
    match node:
        case ast.Name(id=name):
            return name in CONVERSIONS
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return module in NUMPY_NAMES and name not in FRESH_ARRAYS and not name.startswith(("int", "uint", "float"))
        case _:
            return False


def _handed_on(call: ast.Call) -> list[ast.expr]:
    """Arguments; none of a call in which the name of a type is just that."""
    match call.func:
        case ast.Name(id="isinstance" | "issubclass" | "cast"):
            return []
        case ast.Attribute(value=ast.Name(id=module), attr=name) if module in NUMPY_NAMES and name in FRESH_ARRAYS:
            return []
        case _:
            return [*call.args, *(keyword.value for keyword in call.keywords)]


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


@pytest.mark.parametrize("path", LAUNCH_PATH)
def test_nothing_on_the_way_to_a_launch_reads_in_passing(path: str) -> None:
    assert set(hidden_reads((ROOT / path).read_text())) == OF_HOST_VALUES.get(path, set())


@pytest.mark.parametrize(
    "read",
    [
        "int(outputs.small_BX[0, 0])",
        "if bool(x): pass",
        "y = [float(v) for v in x]",
        "np.array(x)",
        "numpy.max(x)",
        "np.stack([x, x])",
        "rows = map(int, x)",
        "found = sorted(x, key=float)",
        "list(x)",
    ],
)
def test_a_planted_read_in_passing_is_seen(read: str) -> None:
    assert hidden_reads(f"x = 1\n{read}\n")


@pytest.mark.parametrize(
    "harmless",
    [
        "np.zeros((3,), np.int32)",
        "np.zeros(3, bool)",
        "isinstance(x, int)",
        "def f(x: int) -> bool: ...",
        "jnp.array(x)",
        "x.sum()",
    ],
)
def test_what_reads_nothing_in_passing_is_not_seen(harmless: str) -> None:
    assert not hidden_reads(harmless)


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
