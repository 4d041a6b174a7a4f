"""Merges the parts of items that several CTAs of the attention kernel held, and zeroes dead slots' rows."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.paged_attention.mosaic_gpu_schedule import TILE, Layout

_ROWS = 8  # rows a CTA merges
_PARTS = 4  # parts whose loads are in flight together
_MASKED = -1e30


def combine(
    layout: Layout,
    lens_B: jax.Array,
    high: jax.Array,
    low: jax.Array,
    lse: jax.Array,
    holders: jax.Array,
    out_ref: jax.Ref,
    *,
    interpret: object = None,
) -> None:
    """Completes `out_ref`, of which the attention kernel has written the items held by one CTA."""
    rows = min(_ROWS, layout.tile_rows)
    pieces = _pieces(layout.v_channels)

    def body(lens, high, low, lse, holders, out):
        item = lax.axis_index("item")
        first_row = lax.axis_index("rows") * rows
        is_dead = lens[lax.div(item, layout.items_per_slot)] < 0

        @pl.when(is_dead)
        def _():
            for row in range(rows):
                for columns, placed in pieces:
                    zeros = plgpu.layout_cast(jnp.zeros((columns.size,), out.dtype), placed)
                    out[item * layout.tile_rows + first_row + row, columns] = zeros

        @pl.when(jnp.logical_not(is_dead))
        def _():
            first, last = holders[2 * item], holders[2 * item + 1]

            @pl.when(first < last)
            def _():
                for row in range(rows):
                    for columns, placed in pieces:
                        merged = _merge_row(layout, high, low, lse, first, last, first_row + row, columns, placed)
                        out[item * layout.tile_rows + first_row + row, columns] = merged.astype(out.dtype)

    plgpu.kernel(
        body,
        out_type=(),
        grid=(layout.num_items, layout.tile_rows // rows),
        grid_names=("item", "rows"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(lens_B, high, low, lse, holders, out_ref)


def _pieces(channels: int) -> list[tuple[object, object]]:
    """Columns taken at a time, and how a warpgroup's 128 threads hold them."""
    if channels % 128 == 0:
        vector = max(size for size in (1, 2, 4) if channels % (128 * size) == 0)
        return [(pl.ds(0, channels), plgpu.Layout.WG_STRIDED((channels,), vec_size=vector))]
    return [(pl.ds(column, 64), plgpu.Layout.WGMMA.reduce(0)) for column in range(0, channels, 64)]


def _merge_row(layout: Layout, high, low, lse, first: jax.Array, last: jax.Array, row: jax.Array, columns, placed):
    """Columns of one output row: the parts' rows weighted by 2^(their log2 sum)."""

    def step(group, carry):
        top, total, out = carry
        for i in range(_PARTS):
            cta = first + group * _PARTS + i
            is_part = cta <= last
            index = 2 * jnp.minimum(cta, last) + jnp.where(cta == first, 1, 0)
            part_lse = jnp.where(is_part, lse[index * TILE + row], _MASKED)
            at = index * layout.tile_rows + row
            value, rest = (plgpu.load(ref.at[at, columns], layout=placed, optimized=False) for ref in (high, low))
            value = value.astype(jnp.float32) + rest.astype(jnp.float32)
            new_top = jnp.maximum(top, part_lse)
            decay = jnp.exp2(top - new_top)
            weight = jnp.where(is_part & (part_lse > _MASKED), jnp.exp2(part_lse - new_top), 0.0)
            out = out * decay + value * weight
            total = total * decay + weight
            top = new_top
        return top, total, out

    num_groups = lax.div(last - first + _PARTS, _PARTS)
    zeros = plgpu.layout_cast(jnp.zeros((columns.size,), jnp.float32), placed)
    init = (jnp.float32(_MASKED), jnp.float32(0.0), zeros)
    _, total, out = lax.fori_loop(0, num_groups, step, init)
    return out / jnp.where(total == 0.0, 1.0, total)
