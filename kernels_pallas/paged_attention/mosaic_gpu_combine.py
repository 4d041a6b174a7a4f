"""Merges the parts of items that several CTAs of the attention kernel held, and zeroes dead slots' rows."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.paged_attention.mosaic_gpu_common import MASKED
from kernels_pallas.paged_attention.mosaic_gpu_schedule import TILE, Layout

_PARTS = 4  # part rows whose loads are in flight together for one row; for several rows, half of it each
_MOST_ROWS = 4  # rows a CTA merges


def combine(
    layout: Layout,
    lens_B: jax.Array,
    parts: jax.Array,
    lse: jax.Array,
    cuts: jax.Array,
    out_ref: jax.Ref,
    *,
    interpret: object = None,
) -> None:
    """Completes `out_ref`, of which the attention kernel has written the items held by one CTA.

    Few packed rows a CTA, and for each CTA of the attention kernel: at most one cut item starts there. The kernel is
    launched while the attention kernel still runs, and waits for it itself.
    """
    num_rows = min(layout.tile_rows, layout.num_rows * layout.group)
    rows_per_cta = _MOST_ROWS if num_rows >= 4 * _MOST_ROWS else 1
    pieces = _pieces(layout.v_channels)

    def body(lens, parts, lse, cuts, out):
        if interpret is None:
            plgpu.griddepcontrol_wait()
        cta, first_row = lax.axis_index("cta"), lax.axis_index("rows") * rows_per_cta
        item = cuts[2 * cta]

        @pl.when(item >= 0)
        def _():
            for columns, placed in pieces:
                merged = _merge_rows(parts, lse, cta, cuts[2 * cta + 1], (first_row, rows_per_cta), columns, placed)
                for row in range(rows_per_cta):
                    out[item * layout.out_rows + first_row + row, columns] = merged[row].astype(out.dtype)

        def zero_slot(index, carry):
            slot = cta + index * layout.num_ctas

            @pl.when(lens[slot] < 0)
            def _():
                for sub in range(layout.items_per_slot):
                    first = (slot * layout.items_per_slot + sub) * layout.out_rows + first_row
                    for columns, placed in pieces:
                        zeros = plgpu.layout_cast(jnp.zeros((columns.size,), out.dtype), placed)
                        for row in range(rows_per_cta):
                            out[first + row, columns] = zeros

            return carry

        num_mine = lax.div(layout.num_slots - cta + (layout.num_ctas - 1), layout.num_ctas)
        lax.fori_loop(0, num_mine, zero_slot, jnp.int32(0))

    body.__name__ = "paged_attention_mosaic_gpu_combine"
    plgpu.kernel(
        body,
        out_type=(),
        grid=(layout.num_ctas, -(-num_rows // rows_per_cta)),
        grid_names=("cta", "rows"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(lens_B, parts, lse, cuts, out_ref)


def _pieces(channels: int) -> list[tuple[object, object]]:
    """Columns taken at a time, and how a warpgroup's 128 threads hold them."""
    if channels % 128 == 0:
        vector = max(size for size in (1, 2, 4) if channels % (128 * size) == 0)
        return [(pl.ds(0, channels), plgpu.Layout.WG_STRIDED((channels,), vec_size=vector))]
    return [(pl.ds(column, 64), plgpu.Layout.WGMMA.reduce(0)) for column in range(0, channels, 64)]


def _merge_rows(parts, lse, first: jax.Array, last: jax.Array, rows: tuple[jax.Array, int], columns, placed) -> list:
    """Columns of the output rows (first, how many): the parts' rows weighted by 2^(their log2 sum)."""
    first_row, num_rows = rows
    in_flight = _PARTS if num_rows == 1 else _PARTS // 2

    def step(group, carry):
        ctas = [first + group * in_flight + i for i in range(in_flight)]
        starts = [(2 * jnp.minimum(cta, last) + jnp.where(cta == first, 1, 0)) * TILE + first_row for cta in ctas]
        loads = [
            [
                (
                    jnp.where(cta <= last, lse[start + row], MASKED),
                    plgpu.load(parts.at[start + row, columns], layout=placed, optimized=False),
                )
                for cta, start in zip(ctas, starts, strict=True)
            ]
            for row in range(num_rows)
        ]
        merged = []
        for (top, total, out), row_loads in zip(carry, loads, strict=True):
            for part_lse, value in row_loads:
                new_top = jnp.maximum(top, part_lse)
                decay = jnp.exp2(top - new_top)
                weight = jnp.where(part_lse > MASKED, jnp.exp2(part_lse - new_top), 0.0)
                top, total, out = new_top, total * decay + weight, out * decay + value * weight
            merged.append((top, total, out))
        return merged

    num_groups = lax.div(last - first + in_flight, in_flight)
    zeros = plgpu.layout_cast(jnp.zeros((columns.size,), jnp.float32), placed)
    init = [(jnp.float32(MASKED), jnp.float32(0.0), zeros) for _ in range(num_rows)]
    sums = lax.fori_loop(0, num_groups, step, init)
    return [out / jnp.where(total == 0.0, 1.0, total) for _, total, out in sums]
