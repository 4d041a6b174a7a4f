"""Grouped matmul on a GPU: the kernel against XLA's ways, and the bytes of the active experts' weights.

    python -m kernels_pallas.bench_grouped

Prints a line a shape and way; the last line is JSON.
"""

import functools
import json
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_pallas.bench_gpu import device_times
from kernels_pallas.grouped_matmul import BACKENDS, grouped_matmul


@dataclass(frozen=True)
class Shape:
    """Tokens that each choose `num_chosen` of the experts at random."""

    name: str
    num_tokens: int
    num_experts: int
    num_chosen: int
    in_channels: int
    out_channels: int


SHAPES = [
    Shape("256 experts, 32 here, 64 tokens", 64, 32, 1, 7168, 4096),
    Shape("256 experts, 32 here, 256 tokens", 256, 32, 1, 7168, 4096),
    Shape("64 experts, 6 chosen, 8 tokens", 8, 64, 6, 2048, 2816),
    Shape("64 experts, 6 chosen, 64 tokens", 64, 64, 6, 2048, 2816),
]
_CALLS = 4  # in one timed program, each with weights of its own: calls with the same would be merged


def draw_counts(shape: Shape, seed: int) -> np.ndarray:
    """Rows of each expert: every token takes `num_chosen` different ones."""
    rng = np.random.default_rng(seed)
    chosen = [rng.choice(shape.num_experts, shape.num_chosen, replace=False) for _ in range(shape.num_tokens)]
    return np.bincount(np.concatenate(chosen), minlength=shape.num_experts).astype(np.int32)


def weight_bytes(shape: Shape, counts: np.ndarray) -> int:
    """Bytes of bf16 weights that must be read: those of experts with rows."""
    return int((counts > 0).sum()) * shape.in_channels * shape.out_channels * 2


def through_all(x_PD: jax.Array, w_XDF: jax.Array, num_rows_X: jax.Array) -> jax.Array:
    """Every row through every expert: what needs no sorting."""
    expert_P = jnp.searchsorted(jnp.cumsum(num_rows_X), jnp.arange(x_PD.shape[0]), side="right")
    x_XPD = jnp.broadcast_to(x_PD, (w_XDF.shape[0], *x_PD.shape))
    return lax.batch_matmul(x_XPD, w_XDF)[expert_P, jnp.arange(x_PD.shape[0])]


WAYS = {name: functools.partial(grouped_matmul, backend=name) for name in BACKENDS} | {"through all": through_all}


def measure(shape: Shape, way: str) -> dict[str, object]:
    """Time of a call and the weights' bytes over it; the largest error against products expert by expert."""
    counts = draw_counts(shape, 0)
    num_rows = int(counts.sum())
    keys = jax.random.split(jax.random.key(0), 2 * _CALLS)
    sizes = (shape.num_experts, shape.in_channels, shape.out_channels)
    weights = [jax.random.normal(key, sizes, "bfloat16") for key in keys[:_CALLS]]
    rows = [jax.random.normal(key, (num_rows, shape.in_channels), "bfloat16") for key in keys[_CALLS:]]

    @jax.jit
    def program(rows, weights, counts):
        return [WAYS[way](x, w, counts) for x, w in zip(rows, weights, strict=True)]

    arguments = (rows, weights, jnp.asarray(counts))
    out = np.asarray(program(*arguments)[0].astype(jnp.float32))
    error, first = 0.0, 0
    for expert, count in enumerate(counts):
        mine = slice(first, first + int(count))
        expected = jnp.dot(rows[0][mine], weights[0][expert], preferred_element_type=jnp.float32)
        error = max(error, float(np.abs(out[mine] - np.asarray(expected)).max(initial=0.0)))
        first += int(count)
    kernels = device_times(lambda: program(*arguments), _CALLS)
    us = sum(kernels.values())
    return {
        "name": f"{shape.name}, {way}",
        "us": us,
        "TBps": weight_bytes(shape, counts) / us / 1e6,
        "max_error": error,
        "spread": float(np.abs(out).std()),
        "kernels": dict(list(kernels.items())[:6]),
    }


def main() -> int:
    """Measures every shape with every backend."""
    results = []
    for shape in SHAPES:
        for way in WAYS:
            try:
                result = measure(shape, way)
            except Exception as error:  # one way may not do a shape; the others still count
                result = {"name": f"{shape.name}, {way}", "error": f"{type(error).__name__}: {str(error)[:300]}"}
            results.append(result)
            print(
                " ".join(
                    f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
                    for key, value in result.items()
                ),
                flush=True,
            )
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
