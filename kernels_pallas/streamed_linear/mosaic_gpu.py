"""The streamed linear product on NVIDIA Hopper: weights stream through shared memory once, whatever the rows are.

In a decoding step the weights are all the cost. They lie on the matrix units' tall side (64 outputs), the few rows on
the flat one (8 and up), so eight rows cost what one costs.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from kernels_pallas.streamed_linear.contract import Form, Problem

MAX_ROWS = 64
ROW_GROUP = 8  # rows of a swizzled tile, and the step of the matrix units' flat side
UNIT = 64  # outputs that a product holds at least, and bf16 channels in one swizzled line
_OLDEST_JAX = (0, 11)
_CLUSTERS = {1: 132, 2: 66, 4: 30, 8: 14}  # of so many CTAs each, that surely fit the card at once
_ENOUGH_CTAS = 64
_STAGES = {1: 10, 2: 5, 4: 6}  # blocks in flight a CTA, by the squares of 64 x 64 in a block: more were slower
_MOST_STAGES = 10
_IN_FLIGHT_BYTES = 8 << 20  # of all CTAs together, where there are few
_SHARED_BYTES = 219 * 1024  # without what the compiler takes


@dataclass(frozen=True)
class TileConfig:
    """How the weights are cut.

    A cluster of `k_split` CTAs makes `out_block` outputs (gated: that many gates and ups together), each CTA from its
    own stretch of the channels in, `in_block` at a time with `num_stages` blocks in flight. At most `num_clusters` work
    at once; outputs beyond are their next turns. `early_weights` loads the first weights before the kernel in front of
    this one is done: only where no kernel of the same program writes them.
    """

    in_block: int = 128
    out_block: int = 64
    k_split: int = 1
    num_stages: int = 8
    num_clusters: int = 132
    early_weights: bool = False


def supports(problem: Problem) -> str | None:
    """Why this backend cannot do the problem, or None."""
    if jax.__version_info__ < _OLDEST_JAX:
        return f"jax is {jax.__version__}; its Mosaic GPU kernels need {'.'.join(map(str, _OLDEST_JAX))} or newer."
    if problem.dtype != "bfloat16":
        return f"weights are {problem.dtype}; they must be bfloat16."
    if problem.form.out_dtype not in ("bfloat16", "float32"):
        return f"the result is {problem.form.out_dtype}; it must be bfloat16 or float32."
    if problem.in_channels % UNIT or problem.out_channels % UNIT:
        return f"{problem.in_channels} channels in and {problem.out_channels} out; they must be multiples of {UNIT}."
    if not 0 < problem.num_rows <= MAX_ROWS:
        return f"there are {problem.num_rows} rows; it must be 1 to {MAX_ROWS}."
    return None


def default_tile(problem: Problem) -> TileConfig:
    """The cut for a shape. It does not depend on the number of rows: sums would be made in another order.

    Wide results need no split: each CTA makes outputs of its own. Narrow ones are split until half of the
    multiprocessors have work, which is enough of them to ask for all that the memory gives.
    """
    is_gated = problem.form.is_gated
    outputs = problem.out_channels * (2 if is_gated else 1)
    is_wide = outputs // (2 * UNIT) >= _ENOUGH_CTAS and outputs % (2 * UNIT) == 0
    out_block = 2 * UNIT if is_gated or is_wide else UNIT
    in_block = 2 * UNIT if problem.in_channels % (2 * UNIT) == 0 and not is_gated else UNIT
    split = 1
    while outputs // out_block * split < _ENOUGH_CTAS and problem.in_channels % (2 * split * in_block) == 0:
        split *= 2
        if split == max(_CLUSTERS):
            break
    block_bytes, rows = 2 * in_block * out_block, padded_rows(problem.num_rows)
    num_ctas = min(outputs // out_block, _CLUSTERS[split]) * split
    wanted = max(_STAGES[in_block * out_block // UNIT**2], -(-_IN_FLIGHT_BYTES // (num_ctas * block_bytes)))
    fitting = (_SHARED_BYTES - 6 * rows * out_block) // (block_bytes + 2 * in_block * rows)
    stages = min(wanted, fitting, _MOST_STAGES)
    return TileConfig(in_block, out_block, split, stages, _CLUSTERS[split])


def linear_gpu(
    form: Form,
    x_RD: jax.Array,
    w: jax.Array,
    norm_weight_D: jax.Array | None = None,
    residual_RN: jax.Array | None = None,
    *,
    tile: TileConfig | None = None,
    interpret: object = None,
) -> jax.Array:
    """See `contract`. `interpret` is Pallas' own switch to run without a GPU."""
    problem = Problem.of(form, x_RD, w, residual_RN)
    tile = tile or default_tile(problem)
    stretch, rest = divmod(problem.in_channels, tile.k_split)
    if rest or stretch % tile.in_block:
        raise ValueError(
            f"{problem.in_channels} channels in cannot be cut into {tile.k_split} x {tile.in_block}; change the tile."
        )
    outputs = problem.out_channels * (2 if form.is_gated else 1)
    if tile.out_block not in (UNIT, 2 * UNIT) or outputs % tile.out_block or (form.is_gated and tile.out_block == UNIT):
        raise ValueError(f"{outputs} outputs cannot be cut into blocks of {tile.out_block}; change the tile.")
    return _run(problem, tile, interpret, x_RD, w, norm_weight_D, residual_RN)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(
    problem: Problem,
    tile: TileConfig,
    interpret: object,
    x_RD: jax.Array,
    w: jax.Array,
    norm_weight_D: jax.Array | None,
    residual_RN: jax.Array | None,
) -> jax.Array:
    from kernels_pallas.streamed_linear.mosaic_gpu_kernel import multiply  # needs absl-py, which `supports` must not

    num_rows = problem.num_rows
    missing = padded_rows(num_rows) - num_rows
    if num_rows > ROW_GROUP and missing:  # the copy engine takes whole groups of rows, or less than one
        problem = replace(problem, num_rows=num_rows + missing)
        x_RD, residual_RN = (a if a is None else jnp.pad(a, ((0, missing), (0, 0))) for a in (x_RD, residual_RN))
    return multiply(problem, tile, x_RD, w, norm_weight_D, residual_RN, interpret=interpret)[:num_rows]


def padded_rows(num_rows: int) -> int:
    """Rows that the matrix units work on."""
    return -(-num_rows // ROW_GROUP) * ROW_GROUP


def out_type(problem: Problem) -> jax.ShapeDtypeStruct:
    """Type of the result."""
    return jax.ShapeDtypeStruct((problem.num_rows, problem.out_channels), jnp.dtype(problem.form.out_dtype))
