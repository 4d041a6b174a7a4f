"""Streamed linear products on a GPU: the kernel and XLA on the products of a decoding step, one by one and in a row.

Cases of `python -m kernels_pallas.bench --only linear`. A program calls its product many times, each call with weights
of its own, together well beyond the L2 cache. Its time is that from the first kernel's start to the last one's end by
the profiler, over the number of calls: gaps between kernels count.
"""

import functools
import glob
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.bench_gpu import Gpu
from kernels_pallas.streamed_linear import BACKENDS, Form, Problem
from kernels_pallas.streamed_linear.mosaic_gpu import TileConfig, default_tile, linear_gpu

ROWS = (1, 8, 32, 64)
_XLA_ROWS = (1, 8, 64)  # it tries many kernels for each
_MIN_BYTES = 250e6  # weights of one timed program
_LIMITS = {"step": 5e-2}  # of the error, over the norm: 64 products in a row, against those that round elsewhere
_PROFILED = 5  # runs of a program under the profiler
_FIRST_ROWS = 3  # compared bit by bit between launches of different sizes


@dataclass(frozen=True)
class Shape:
    """One product of a decoding step."""

    in_channels: int
    out_channels: int
    form: Form
    has_residual: bool = False

    def problem(self, num_rows: int) -> Problem:
        """The product for so many rows."""
        return Problem(num_rows, self.in_channels, self.out_channels, "bfloat16", self.form, self.has_residual)


_NORM = Form(norm_eps=1e-5)
_LOGITS = Form(is_out_major=True, out_dtype="float32")
SHAPES = {  # 1.24 billion weights: 16 layers of these four, and the head
    "qkv": Shape(2048, 3072, _NORM),
    "wo": Shape(2048, 2048, Form(), has_residual=True),
    "gate_up": Shape(2048, 8192, replace(_NORM, is_gated=True)),
    "down": Shape(8192, 2048, Form(), has_residual=True),
    "head": Shape(2048, 128256, _LOGITS),
    "shortlist": Shape(2048, 16384, _LOGITS),
}
NUM_LAYERS = 16


@dataclass(frozen=True)
class LinearCase:
    """All numbers of rows of one product done one way, in one process. `tile`: (field, value) pairs of a variant."""

    name: str
    shape: str  # a name in SHAPES, or "step"
    way: str  # a name in BACKENDS
    rows: tuple[int, ...] = ROWS
    tile: tuple[tuple[str, int], ...] = ()
    kind: str = "linear"

    @property
    def is_tried_on_gpu(self) -> bool:
        """Whether the compiler chooses kernels by trying them, so that nothing else may run on the GPU meanwhile."""
        return self.way == "xla"

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "LinearCase":
        """The case whose fields went through JSON."""
        tile = tuple((name, value) for name, value in fields["tile"])
        return cls(**{**fields, "rows": tuple(fields["rows"]), "tile": tile})


def _cases() -> list[LinearCase]:
    names = ["step", *SHAPES]
    cases = [LinearCase(f"linear {name} mosaic_gpu", name, "mosaic_gpu") for name in names]
    return cases + [LinearCase(f"linear {name} xla", name, "xla", _XLA_ROWS) for name in names]


LINEAR: list[LinearCase] = _cases()


def variant(case: LinearCase, **fields: int) -> LinearCase:
    """The case with another tile, for eight rows alone."""
    name = " ".join(f"{key}={int(value)}" for key, value in fields.items())
    return replace(case, name=f"{case.name} {name}", rows=(8,), tile=tuple(fields.items()))


def run_case(case: LinearCase, lock: str) -> dict[str, Any]:
    """The case's name and a list of results, one a number of rows."""
    results = []
    for num_rows in case.rows:
        try:
            result = measure(case, num_rows, lock)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        results.append({"name": f"{case.name} R={num_rows}", **result})
    return {"name": case.name, "results": results}


def product(case: LinearCase, shape: Shape, num_rows: int) -> Callable[..., jax.Array]:
    """The product of the case: (x, w, norm weight or None, residual or None) -> result."""
    if case.way != "mosaic_gpu":
        return lambda *arrays: BACKENDS[case.way].run(shape.form, *arrays)
    problem = shape.problem(num_rows)
    reason = BACKENDS[case.way].supports(problem)
    if reason is not None:
        raise NotImplementedError(reason)
    fields: dict[str, Any] = dict(case.tile)
    tile: TileConfig = replace(default_tile(problem), **fields)
    return lambda *arrays: linear_gpu(shape.form, *arrays, tile=tile)


def measure(case: LinearCase, num_rows: int, lock: str) -> dict[str, Any]:
    """Time of a call (of "step": of all products of a step), weight bytes over it, error against float32."""
    program, weights, arguments, num_calls = (_step if case.shape == "step" else _repeated)(case, num_rows)
    num_bytes = sum(w.size * 2 for w in jax.tree.leaves(weights) if w.ndim == 2)
    start = time.monotonic()
    compiled = None if case.is_tried_on_gpu else jax.jit(program).lower(weights, *arguments).compile()
    with Gpu(lock):
        if compiled is None:
            compiled = jax.jit(program).lower(weights, *arguments).compile()
        compile_s = time.monotonic() - start
        weights, arguments = _filled_weights(weights), _filled(arguments, 1)
        outs = jax.block_until_ready(compiled(weights, *arguments))
        spans, kernels = _profile(lambda: compiled(weights, *arguments))
        again = compiled(weights, *arguments)
        is_repeatable = all(bool((a == b).all()) for a, b in zip(outs, again, strict=True))
        error, first_rows = _judge(case, num_rows, weights, arguments, outs)
    us = statistics.median(spans) / num_calls
    result = {
        "us": us,
        "kernel_us": sum(kernels.values()) / num_calls,
        "TBps": num_bytes / num_calls / us / 1e6,
        "TFLOPs": num_bytes / num_calls * num_rows / us / 1e6,
        "max_error": error,
        "bits": first_rows,
        "compile_s": compile_s,
        "kernels": {name: round(us / num_calls, 2) for name, us in list(kernels.items())[:5]},
        "spans": [round(span / num_calls, 2) for span in spans],
    }
    if not error <= _LIMITS.get(case.shape, 1e-2) or not is_repeatable:
        result["error"] = f"wrong: {error} of the norm, same bits again: {is_repeatable}; {us:.1f} us"
    return result


def _repeated(case: LinearCase, num_rows: int):
    shape = SHAPES[case.shape]
    run = product(case, shape, num_rows)
    outputs = shape.out_channels * (2 if shape.form.is_gated else 1)
    size = (shape.in_channels, outputs)
    num_calls = max(2, min(24, int(_MIN_BYTES / shape.problem(1).weight_bytes) + 1))
    weights = [_array(size[::-1] if shape.form.is_out_major else size) for _ in range(num_calls)]
    norm = None if shape.form.norm_eps is None else _array((shape.in_channels,))
    residual = _array((num_rows, shape.out_channels)) if shape.has_residual else None

    def program(weights, rows, norm, residual):
        return [run(x, w, norm, residual) for x, w in zip(rows, weights, strict=True)]

    # Each call has rows of its own: XLA joins products that share them, and copies their weights for that.
    rows = [_array((num_rows, shape.in_channels)) for _ in range(num_calls)]
    return program, weights, (rows, norm, residual), num_calls


def _step(case: LinearCase, num_rows: int):
    """All products of a step. Where a decoder has attention, the queries go on as they are."""
    runs = {name: product(case, shape, num_rows) for name, shape in SHAPES.items()}
    names = ("qkv", "wo", "gate_up", "down")
    outputs = {name: SHAPES[name].out_channels * (2 if SHAPES[name].form.is_gated else 1) for name in names}
    layer = {name: _array((SHAPES[name].in_channels, outputs[name])) for name in names} | {
        "norm": _array((2048,)),
        "norm2": _array((2048,)),
    }
    weights = {"layers": [layer] * NUM_LAYERS, "head": _array((128256, 2048))}

    def program(weights, x):
        for layer in weights["layers"]:
            qkv = runs["qkv"](x, layer["qkv"], layer["norm"], None)
            x = runs["wo"](qkv[:, :2048], layer["wo"], None, x)
            hidden = runs["gate_up"](x, layer["gate_up"], layer["norm2"], None)
            x = runs["down"](hidden, layer["down"], None, x)
        return [runs["head"](x, weights["head"], None, None)]

    return program, weights, (_array((num_rows, 2048)),), 1


def _array(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


@functools.cache
def _weights_of(structure: Any, sizes: tuple[tuple[int, ...], ...]) -> Any:
    return _filled(jax.tree.unflatten(structure, [_array(size) for size in sizes]), 0)


def _filled_weights(tree: Any) -> Any:
    """`_filled`, made once for all numbers of rows."""
    leaves, structure = jax.tree.flatten(tree)
    return _weights_of(structure, tuple(leaf.shape for leaf in leaves))


def _filled(tree: Any, seed: int) -> Any:
    """Normal random numbers in the place of types: matrices of weights such that products have the size of their x.

    Row i of x is the same whatever the number of rows.
    """
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(structure, [_normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)])


def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if len(shape) == 2 and shape[0] < 2048:
        rows = [jax.random.normal(jax.random.fold_in(key, row), shape[1:], "bfloat16") for row in range(shape[0])]
        return jnp.stack(rows)
    scale = 2048**-0.5 if len(shape) == 2 else 1.0
    return jax.random.normal(key, shape, "bfloat16") * jnp.bfloat16(scale)


def _judge(case: LinearCase, num_rows: int, weights: Any, arguments: tuple, outs: list) -> tuple[float, str]:
    """Largest error of a call's result over its norm, against float32; and the first rows' bits, hashed."""
    first_rows = np.asarray(outs[0][: min(_FIRST_ROWS, num_rows)].astype(jnp.float32))
    bits = [f"{zlib.crc32(row.tobytes()):08x}" for row in first_rows]
    if case.shape == "step":
        expected_program, *_ = _step(replace(case, way="xla", tile=()), num_rows)
        expected = jax.jit(expected_program)(weights, *arguments)
        pairs = list(zip(outs, expected, strict=True))
    else:
        form = replace(SHAPES[case.shape].form, out_dtype="float32")

        @jax.jit
        def expect(x, w, norm, residual):
            with jax.default_matmul_precision("highest"):
                return BACKENDS["xla"].run(form, x.astype(jnp.float32), w.astype(jnp.float32), norm, residual)

        rows, norm, residual = arguments
        pairs = [(outs[-1], expect(rows[-1], weights[-1], norm, residual))]
    errors = [jnp.linalg.norm(out.astype(jnp.float32) - good) / jnp.linalg.norm(good) for out, good in pairs]
    return float(max(errors)), " ".join(bits)


def _profile(call: Callable[[], Any]) -> tuple[list[float], dict[str, float]]:
    """Microseconds from the first kernel's start to the last one's end, run by run; each kernel's in the last."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(_PROFILED):
                jax.block_until_ready(call())
        [file] = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        events = [
            event
            for plane in jax.profiler.ProfileData.from_file(file).planes
            if "/device:GPU" in plane.name
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
    events.sort(key=lambda event: event.start_ns)
    size, rest = divmod(len(events), _PROFILED)
    if rest or not size:
        raise RuntimeError(f"the profiler saw {len(events)} kernels in {_PROFILED} runs of one program.")
    runs = [events[first : first + size] for first in range(0, len(events), size)]
    ends = [max(event.start_ns + event.duration_ns for event in run) for run in runs]
    spans = [(end - run[0].start_ns) / 1e3 for run, end in zip(runs, ends, strict=True)]
    totals: dict[str, float] = {}
    for event in runs[-1]:
        totals[event.name[:40]] = totals.get(event.name[:40], 0.0) + event.duration_ns / 1e3
    return spans, dict(sorted(totals.items(), key=lambda item: -item[1]))
