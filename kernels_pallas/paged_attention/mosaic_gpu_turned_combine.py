"""Merges the parts that `mosaic_gpu_turned` leaves as [channels, rows], and zeroes dead slots' rows."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.paged_attention.mosaic_gpu_common import COLUMNS, MASKED, item_rows
from kernels_pallas.paged_attention.mosaic_gpu_schedule import Layout
from kernels_pallas.paged_attention.mosaic_gpu_turned import num_columns

_PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)
_IN_FLIGHT = 2  # parts whose loads are in flight together


def combine_turned(
    layout: Layout,
    lens_B: jax.Array,
    parts: jax.Array,
    lse: jax.Array,
    cuts: jax.Array,
    out_ref: jax.Ref,
    *,
    interpret: object = None,
) -> None:
    """Completes `out_ref`. A CTA for each 64 channels and each CTA of the attention kernel, where an item may start."""
    columns, rows = num_columns(layout), layout.tile_rows
    pieces = layout.v_channels // COLUMNS

    def body(lens, parts, lse, cuts, out, tile_smem):
        if interpret is None:
            plgpu.griddepcontrol_wait()
        cta, piece = lax.axis_index("cta"), lax.axis_index("piece")

        def send(item):
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                tile_smem.at[pl.ds(0, rows)],
                out.at[item_rows(item, rows), pl.ds(pl.multiple_of(piece * COLUMNS, COLUMNS), COLUMNS)],
            )
            plgpu.wait_smem_to_gmem(0)

        @pl.when(cuts[2 * cta] >= 0)
        def _():
            merged = _merge(layout, parts, lse, cta, cuts[2 * cta + 1], piece)
            tile_smem.transpose((1, 0))[...] = merged.astype(tile_smem.dtype)
            send(cuts[2 * cta])

        def zero_slot(index, carry):
            slot = cta + index * layout.num_ctas

            @pl.when(lens[slot] < 0)
            def _():
                zeros = plgpu.layout_cast(jnp.zeros((COLUMNS, columns), tile_smem.dtype), plgpu.Layout.WGMMA)
                tile_smem.transpose((1, 0))[...] = zeros
                send(slot)

            return carry

        num_mine = lax.div(layout.num_slots - cta + (layout.num_ctas - 1), layout.num_ctas)
        lax.fori_loop(0, num_mine, zero_slot, jnp.int32(0))

    body.__name__ = "paged_attention_mosaic_gpu_turned_combine"
    plgpu.kernel(
        body,
        out_type=(),
        scratch_types={
            "tile_smem": plgpu.SMEM(
                (columns, COLUMNS),
                out_ref.dtype,
                transforms=(plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(COLUMNS * 2)),
            )
        },
        grid=(layout.num_ctas, pieces),
        grid_names=("cta", "piece"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(lens_B, parts, lse, cuts, out_ref)


def _merge(layout: Layout, parts, lse, first: jax.Array, last: jax.Array, piece: jax.Array):
    """[channels, rows] of the parts that CTAs `first` to `last` hold, weighted by 2^(their log2 sum)."""
    columns = num_columns(layout)

    def load(cta):
        part = 2 * jnp.minimum(cta, last) + jnp.where(cta == first, 1, 0)
        start = pl.multiple_of(part * layout.v_channels + piece * COLUMNS, COLUMNS)
        part_lse = lse.at[pl.ds(pl.multiple_of(part * columns, columns), columns)]
        part_lse = plgpu.load(part_lse, layout=_PER_COLUMN, optimized=False)
        value = plgpu.load(parts.at[pl.ds(start, COLUMNS)], layout=plgpu.Layout.WGMMA, optimized=False)
        return jnp.where(cta <= last, part_lse, MASKED), value

    def step(index, carry):
        loads = [load(first + index * _IN_FLIGHT + i) for i in range(_IN_FLIGHT)]
        top, total, out = carry
        for part_lse, value in loads:
            new_top = jnp.maximum(top, part_lse)
            decay = jnp.exp2(top - new_top)
            weight = jnp.where(part_lse > MASKED, jnp.exp2(part_lse - new_top), 0.0)
            wide = [lax.broadcast_in_dim(x, value.shape, [1]) for x in (decay, weight)]
            top, total, out = new_top, total * decay + weight, out * wide[0] + value * wide[1]
        return top, total, out

    init = (
        plgpu.layout_cast(jnp.full((columns,), MASKED, jnp.float32), _PER_COLUMN),
        plgpu.layout_cast(jnp.zeros((columns,), jnp.float32), _PER_COLUMN),
        plgpu.layout_cast(jnp.zeros((COLUMNS, columns), jnp.float32), plgpu.Layout.WGMMA),
    )
    _, total, out = lax.fori_loop(0, lax.div(last - first + _IN_FLIGHT, _IN_FLIGHT), step, init)
    factor = 1.0 / jnp.where(total == 0.0, 1.0, total)
    return out * lax.broadcast_in_dim(factor, out.shape, [1])
