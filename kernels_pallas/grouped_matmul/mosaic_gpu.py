"""Grouped matmul on NVIDIA Hopper for few rows an expert: each active expert's weights are read once.

Where a decoding step meets a mixture of experts, an expert gets a handful of rows, and reading its weights is all the
cost. Rows are laid out so that every expert's begin at a multiple of 8; the kernel walks the active experts alone.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.grouped_matmul.contract import Problem

ROW_TILE = 64
_ALIGNMENT = 8  # rows of a swizzled tile: an expert's rows begin at one
_OLDEST_JAX = (0, 11)


@dataclass(frozen=True)
class TileConfig:
    """Weights are read in tiles of `in_block` x `out_block` channels, `num_stages` in flight."""

    in_block: int = 64
    out_block: int = 256
    num_stages: int = 4
    num_ctas: int = 132


def supports(problem: Problem) -> str | None:
    """Why this backend cannot do the problem, or None."""
    if jax.__version_info__ < _OLDEST_JAX:
        return f"jax is {jax.__version__}; its Mosaic GPU kernels need {'.'.join(map(str, _OLDEST_JAX))} or newer."
    if problem.dtype != "bfloat16":
        return f"weights are {problem.dtype}; they must be bfloat16."
    if problem.in_channels % 64 or problem.out_channels % 128:
        return (
            f"{problem.in_channels} channels in and {problem.out_channels} out; "
            "they must be multiples of 64 and of 128."
        )
    return None


def default_tile(problem: Problem) -> TileConfig:
    """256 channels out at once where they divide."""
    return TileConfig() if problem.out_channels % 256 == 0 else TileConfig(out_block=128)


class Placement(NamedTuple):
    """Where rows lie in the kernel's order, and which experts have any."""

    place_P: jax.Array  # row p's place
    expert_X: jax.Array  # active experts first
    start_X: jax.Array  # their first rows' places, multiples of 8
    rows_X: jax.Array  # how many rows they have
    num_active: jax.Array  # [1]


def num_places(problem: Problem) -> int:
    """Places for the rows, for those that fill each expert up to a multiple of 8, and one row tile behind them."""
    filled = problem.num_rows + (_ALIGNMENT - 1) * min(problem.num_experts, problem.num_rows)
    return -(-filled // _ALIGNMENT) * _ALIGNMENT + ROW_TILE


def place_rows(problem: Problem, num_rows_X: jax.Array) -> Placement:
    """Lays the experts' rows one after the other, each expert's from a multiple of 8 on.

    Rows behind the last expert's have the last place of all, where no expert's row lies.
    """
    num_rows_X = num_rows_X.astype(jnp.int32)
    end_X = jnp.cumsum(num_rows_X)
    filled_X = (num_rows_X + (_ALIGNMENT - 1)) // _ALIGNMENT * _ALIGNMENT
    start_X = jnp.cumsum(filled_X) - filled_X
    row_P = jnp.arange(problem.num_rows, dtype=jnp.int32)
    expert_P = jnp.searchsorted(end_X, row_P, side="right").astype(jnp.int32)
    is_row_P = expert_P < problem.num_experts
    expert_P = jnp.minimum(expert_P, problem.num_experts - 1)
    place_P = start_X[expert_P] + row_P - (end_X - num_rows_X)[expert_P]
    order_X = jnp.argsort(num_rows_X == 0, stable=True).astype(jnp.int32)
    return Placement(
        place_P=jnp.where(is_row_P, place_P, num_places(problem) - 1),
        expert_X=order_X,
        start_X=start_X[order_X],
        rows_X=num_rows_X[order_X],
        num_active=(num_rows_X > 0).sum(dtype=jnp.int32)[None],
    )


def grouped_matmul_gpu(
    x_PD: jax.Array,
    w_XDF: jax.Array,
    num_rows_X: jax.Array,
    *,
    tile: TileConfig | None = None,
    interpret: object = None,
) -> jax.Array:
    """See `contract`. `interpret` is Pallas' own switch to run without a GPU."""
    problem = Problem.of(x_PD, w_XDF)
    return _run(problem, tile or default_tile(problem), interpret, x_PD, w_XDF, num_rows_X)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(problem: Problem, tile: TileConfig, interpret: object, x_PD, w_XDF, num_rows_X) -> jax.Array:
    from kernels_pallas.grouped_matmul.mosaic_gpu_kernel import multiply  # needs absl-py, which `supports` must not

    placement = place_rows(problem, num_rows_X)
    placed = jnp.zeros((num_places(problem), problem.in_channels), x_PD.dtype).at[placement.place_P].set(x_PD)
    out = multiply(tile, placement, placed, w_XDF, interpret=interpret)
    is_row_P = placement.place_P < num_places(problem) - 1
    return jnp.where(is_row_P[:, None], out[placement.place_P], 0)
