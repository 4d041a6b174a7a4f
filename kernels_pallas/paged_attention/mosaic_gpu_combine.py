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

    def body(lens, high, low, lse, holders, out):
        item = lax.axis_index("item")
        first_row = lax.axis_index("rows") * rows
        is_dead = lens[lax.div(item, layout.items_per_slot)] < 0

        @pl.when(is_dead)
        def _():
            for row in range(rows):
                out.at[item * layout.tile_rows + first_row + row][...] = jnp.zeros((layout.v_channels,), out.dtype)

        @pl.when(jnp.logical_not(is_dead))
        def _():
            first, last = holders[2 * item], holders[2 * item + 1]

            @pl.when(first < last)
            def _():
                for row in range(rows):
                    merged = _merge_row(layout, high, low, lse, first, last, first_row + row)
                    out.at[item * layout.tile_rows + first_row + row][...] = merged.astype(out.dtype)

    plgpu.kernel(
        body,
        out_type=(),
        grid=(layout.num_items, layout.tile_rows // rows),
        grid_names=("item", "rows"),
        interpret=interpret,
    )(lens_B, high, low, lse, holders, out_ref)


def _merge_row(layout: Layout, high, low, lse, first: jax.Array, last: jax.Array, row: jax.Array):
    """One output row: the parts' rows weighted by 2^(their log2 sum)."""

    def step(group, carry):
        top, total, out = carry
        for i in range(_PARTS):
            cta = first + group * _PARTS + i
            is_part = cta <= last
            index = 2 * jnp.minimum(cta, last) + jnp.where(cta == first, 1, 0)
            part_lse = jnp.where(is_part, lse[index * TILE + row], _MASKED)
            at = index * layout.tile_rows + row
            value = high[at].astype(jnp.float32) + low[at].astype(jnp.float32)
            new_top = jnp.maximum(top, part_lse)
            decay = jnp.exp2(top - new_top)
            weight = jnp.where(is_part & (part_lse > _MASKED), jnp.exp2(part_lse - new_top), 0.0)
            out = out * decay + value * weight
            total = total * decay + weight
            top = new_top
        return top, total, out

    num_groups = lax.div(last - first + _PARTS, _PARTS)
    init = (jnp.float32(_MASKED), jnp.float32(0.0), jnp.zeros((layout.v_channels,), jnp.float32))
    _, total, out = lax.fori_loop(0, num_groups, step, init)
    return out / jnp.where(total == 0.0, 1.0, total)
