"""The Hopper kernel of the grouped matmul: one producer warpgroup streams weights and rows, one multiplies.

An item is an active expert and a tile of its output channels; persistent CTAs take items in turn, so that the tiles of
one expert are worked on together and its rows come from the L2 cache. An expert of more than 64 rows is read again for
each 64.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.grouped_matmul.mosaic_gpu import ROW_TILE, Placement, TileConfig

_SWIZZLE = 128
_COLUMNS = 64  # bf16 channels in one swizzled line
_GROUP = 8  # rows that one store writes: no expert's rows share a group with another's
_CONSUMER, _PRODUCER = 0, 1


def multiply(
    tile: TileConfig, placement: Placement, x: jax.Array, w_XDF: jax.Array, *, interpret: object = None
) -> jax.Array:
    """Rows [places, F] in the places of `x` [places, D]; places where no expert has a row hold anything."""
    num_steps = w_XDF.shape[1] // tile.in_block
    tiles_out = w_XDF.shape[2] // tile.out_block

    def body(expert_ref, start_ref, rows_ref, active_ref, x_ref, w_ref, out_ref, **scratch):
        cta = lax.axis_index("cta")
        num_items = active_ref[0] * tiles_out
        num_mine = lax.div(num_items - cta + (tile.num_ctas - 1), tile.num_ctas)

        def for_each_tile(step):
            """Runs `step(expert, first place, rows left, first column, stage)` for the CTA's row tiles."""

            def item_step(turn, stage):
                item = cta + turn * tile.num_ctas
                active = lax.div(item, tiles_out)
                column = (item - active * tiles_out) * tile.out_block
                rows = rows_ref[active]

                def row_step(index, stage):
                    place = start_ref[active] + index * ROW_TILE
                    return step(expert_ref[active], place, rows - index * ROW_TILE, column, stage)

                return lax.fori_loop(0, lax.div(rows + (ROW_TILE - 1), ROW_TILE), row_step, stage)

            lax.fori_loop(0, num_mine, item_step, jnp.int32(0))

        def produce(expert, place, rows_left, column, stage):  # noqa: ARG001
            def step(index, stage):
                channels = pl.ds(pl.multiple_of(index * tile.in_block, tile.in_block), tile.in_block)
                plgpu.barrier_wait(scratch["empty"].at[stage])
                plgpu.copy_gmem_to_smem(
                    w_ref.at[expert, channels, pl.ds(pl.multiple_of(column, tile.out_block), tile.out_block)],
                    scratch["w_smem"].at[stage],
                    scratch["full"].at[stage],
                )
                plgpu.copy_gmem_to_smem(
                    x_ref.at[pl.ds(pl.multiple_of(place, _GROUP), ROW_TILE), channels],
                    scratch["x_smem"].at[stage],
                    scratch["full"].at[stage],
                )
                return _next_stage(tile, stage)

            return lax.fori_loop(0, num_steps, step, stage)

        def consume(expert, place, rows_left, column, stage):  # noqa: ARG001
            def scope(acc_ref):
                def step(index, stage):  # noqa: ARG001
                    plgpu.barrier_wait(scratch["full"].at[stage])
                    plgpu.wgmma(acc_ref, scratch["x_smem"].at[stage], scratch["w_smem"].at[stage])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(scratch["empty"].at[stage])
                    return _next_stage(tile, stage)

                stage_after = lax.fori_loop(0, num_steps, step, stage)
                return acc_ref[...], stage_after

            out, stage = pl.run_scoped(scope, plgpu.ACC((ROW_TILE, tile.out_block), jnp.float32))
            out_smem = scratch["out_smem"]
            out_smem[...] = out.astype(out_smem.dtype)
            plgpu.commit_smem()
            for group in range(ROW_TILE // _GROUP):

                @pl.when(group * _GROUP < rows_left)
                def _(group=group):
                    plgpu.copy_smem_to_gmem(
                        out_smem.at[pl.ds(group * _GROUP, _GROUP)],
                        out_ref.at[
                            pl.ds(pl.multiple_of(place + group * _GROUP, _GROUP), _GROUP),
                            pl.ds(pl.multiple_of(column, tile.out_block), tile.out_block),
                        ],
                    )

            plgpu.wait_smem_to_gmem(0)
            return stage

        @pl.when(lax.axis_index("wg") == _CONSUMER)
        def _():
            for stage in range(tile.num_stages):
                plgpu.barrier_arrive(scratch["empty"].at[stage])
            for_each_tile(consume)

        @pl.when(lax.axis_index("wg") == _PRODUCER)
        def _():
            for_each_tile(produce)
            for stage in range(tile.num_stages):  # nobody leaves while the consumer still reads
                plgpu.barrier_wait(scratch["empty"].at[stage])

    body.__name__ = "grouped_matmul"
    swizzled = (plgpu.TilingTransform((8, _COLUMNS)), plgpu.SwizzleTransform(_SWIZZLE))
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((x.shape[0], w_XDF.shape[2]), x.dtype),
        scratch_types={
            "w_smem": plgpu.SMEM((tile.num_stages, tile.in_block, tile.out_block), x.dtype, transforms=swizzled),
            "x_smem": plgpu.SMEM((tile.num_stages, ROW_TILE, tile.in_block), x.dtype, transforms=swizzled),
            "out_smem": plgpu.SMEM((ROW_TILE, tile.out_block), x.dtype, transforms=swizzled),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=tile.num_stages),
            "empty": plgpu.Barrier(num_barriers=tile.num_stages),
        },
        grid=(tile.num_ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    return kernel(placement.expert_X, placement.start_X, placement.rows_X, placement.num_active, x, w_XDF)


def _next_stage(tile: TileConfig, stage: jax.Array) -> jax.Array:
    return jnp.where(stage == tile.num_stages - 1, 0, stage + 1)
