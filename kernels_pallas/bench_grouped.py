"""Grouped matmul on a GPU: the kernel and XLA's ragged product, against the bytes of the active experts' weights.

    python -m kernels_pallas.bench_grouped

Prints a line a shape and backend; the last line is JSON.
"""

import functools
import json
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.bench_run import device_times, median_time
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
_CALLS = 8  # in one timed program, each with rows of its own


def draw_counts(shape: Shape, seed: int) -> np.ndarray:
    """Rows of each expert: every token takes `num_chosen` different ones."""
    rng = np.random.default_rng(seed)
    chosen = [rng.choice(shape.num_experts, shape.num_chosen, replace=False) for _ in range(shape.num_tokens)]
    return np.bincount(np.concatenate(chosen), minlength=shape.num_experts).astype(np.int32)


def weight_bytes(shape: Shape, counts: np.ndarray) -> int:
    """Bytes of bf16 weights that must be read: those of experts with rows."""
    return int((counts > 0).sum()) * shape.in_channels * shape.out_channels * 2


def measure(shape: Shape, backend: str) -> dict[str, object]:
    """Time of a call and the weights' bytes over it; the largest error against the reference in float32."""
    counts = draw_counts(shape, 0)
    num_rows = int(counts.sum())
    keys = jax.random.split(jax.random.key(0), _CALLS + 2)
    weights = [
        jax.random.normal(key, (shape.num_experts, shape.in_channels, shape.out_channels), "bfloat16")
        for key in keys[:2]
    ]
    rows = [jax.random.normal(key, (num_rows, shape.in_channels), "bfloat16") for key in keys[2:]]
    multiply = functools.partial(grouped_matmul, backend=backend)

    @jax.jit
    def program(rows, weights, counts):
        return [multiply(x, weights[call % 2], counts) for call, x in enumerate(rows)]

    arguments = (rows, weights, jnp.asarray(counts))
    out = np.asarray(program(*arguments)[0], np.float32)
    expert_P = np.repeat(np.arange(shape.num_experts), counts)
    expected = jnp.einsum("pd,pdf->pf", rows[0][:4], weights[0][expert_P[:4]], preferred_element_type=jnp.float32)
    seconds = median_time(lambda: program(*arguments)) / _CALLS
    return {
        "name": f"{shape.name}, {backend}",
        "us": seconds * 1e6,
        "TBps": weight_bytes(shape, counts) / seconds / 1e12,
        "max_error": float(np.abs(out[:4] - np.asarray(expected)).max()),
        "kernels": device_times(lambda: program(*arguments), _CALLS),
    }


def main() -> int:
    """Measures every shape with every backend."""
    results = [measure(shape, backend) for shape in SHAPES for backend in BACKENDS]
    for result in results:
        print(f"{result['name']:50} {result['us']:9.1f} us {result['TBps']:6.2f} TB/s  error {result['max_error']:.3g}")
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
