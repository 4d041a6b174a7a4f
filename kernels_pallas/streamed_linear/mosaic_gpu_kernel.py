"""The Hopper kernel of the streamed linear product: one producer warpgroup streams, one multiplies.

An item is a block of outputs. The CTAs of a cluster share it: each sums over its own stretch of the channels in, and
the first one adds the others' sums to its own, in order, so that no timing shows in the result. Outputs lie on the
matrix units' tall side and rows on the flat one; the sums leave transposed.

With a norm in front, the consumer multiplies each block of rows by the norm's weight where it lies, and sums squares on
the way; what is left of the norm, one factor a row, is multiplied into the finished sums.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.streamed_linear.contract import Problem
from kernels_pallas.streamed_linear.mosaic_gpu import UNIT, TileConfig, out_type, padded_rows

_SWIZZLE = 128  # bytes
_CONSUMER, _PRODUCER = 0, 1


@dataclass(frozen=True)
class _Refs:
    """The kernel's operands in device memory; the absent ones are None."""

    x: object  # [R, D]
    w: object  # [D, N] or [N, D]
    norm_weight: object  # [D]
    residual: object  # [R, N]
    out: object  # [R, N]
    parts: object  # [items * (CTAs of a cluster) * out_block, R]: float32 sums
    squares: object  # [items * (CTAs of a cluster), R]: float32


def multiply(
    problem: Problem,
    tile: TileConfig,
    x_RD: jax.Array,
    w: jax.Array,
    norm_weight_D: jax.Array | None,
    residual_RN: jax.Array | None,
    *,
    interpret: object = None,
) -> jax.Array:
    """The result [R, N]; see `contract`."""
    operands = [x_RD, w, *(a for a in (norm_weight_D, residual_RN) if a is not None)]
    rows = padded_rows(problem.num_rows)
    num_items = problem.out_channels * (2 if problem.form.is_gated else 1) // tile.out_block
    parts_types = []
    if tile.k_split > 1:
        parts_types.append(jax.ShapeDtypeStruct((num_items * tile.k_split * tile.out_block, rows), jnp.float32))
        if problem.form.norm_eps is not None:
            parts_types.append(jax.ShapeDtypeStruct((num_items * tile.k_split, rows), jnp.float32))

    def body(*refs, **scratch):
        it = iter(refs)
        gmem = _Refs(
            x=next(it),
            w=next(it),
            norm_weight=None if norm_weight_D is None else next(it),
            residual=None if residual_RN is None else next(it),
            out=next(it),
            parts=next(it, None),
            squares=next(it, None),
        )
        cta = _Cta(problem, tile, gmem, scratch, interpret is not None)
        if tile.early_weights and interpret is None:
            plgpu.griddepcontrol_launch_dependents()
        warpgroup = lax.axis_index("wg")

        @pl.when(warpgroup == _CONSUMER)
        def _():
            cta.consume_all()

        @pl.when(warpgroup == _PRODUCER)
        def _():
            cta.produce_all()

    body.__name__ = "streamed_linear"
    kernel = plgpu.kernel(
        body,
        out_type=(out_type(problem), *parts_types),
        scratch_types=_scratch_types(problem, tile),
        grid=(min(tile.num_clusters, num_items),),
        grid_names=("cluster",),
        cluster=(tile.k_split,),
        cluster_names=("rank",),
        num_threads=2,
        thread_name="wg",
        # Lane semantics: layouts are what this file says they are.
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    return kernel(*operands)[0]


def _scratch_types(problem: Problem, tile: TileConfig) -> dict[str, object]:
    rows, stages = padded_rows(problem.num_rows), tile.num_stages

    def swizzled(shape: tuple[int, ...], dtype: str = "bfloat16") -> object:
        columns = _SWIZZLE // jnp.dtype(dtype).itemsize
        transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(_SWIZZLE))
        return plgpu.SMEM(shape, jnp.dtype(dtype), transforms=transforms)

    halves = 2 if problem.form.is_gated else 1
    block = (tile.out_block // halves, tile.in_block)
    has_norm = problem.form.norm_eps is not None
    types: dict[str, object] = {
        "w_smem": swizzled((stages, halves, *(block if problem.form.is_out_major else block[::-1]))),
        "x_smem": swizzled((stages, rows, tile.in_block)),
        "out_smem": swizzled((rows, tile.out_block // halves), problem.form.out_dtype),
        "full": plgpu.Barrier(num_arrivals=halves + 1 + has_norm, num_barriers=stages),
        "empty": plgpu.Barrier(num_barriers=stages),
    }
    if has_norm:
        types |= {
            "g_smem": plgpu.SMEM((stages, tile.in_block), jnp.bfloat16),
            "scale_smem": plgpu.SMEM((rows,), jnp.float32),
        }
    if problem.has_residual:
        types |= {
            "residual_smem": swizzled((rows, tile.out_block // halves)),
            "residual_full": plgpu.Barrier(),
        }
    if tile.k_split > 1:
        types["summed"] = plgpu.ClusterBarrier(collective_axes=("rank",))
    return types


class _Cta:
    """What the two warpgroups of a CTA do."""

    def __init__(self, problem: Problem, tile: TileConfig, gmem: _Refs, scratch: dict, is_interpreted: bool):
        self.problem, self.tile, self.gmem, self.scratch = problem, tile, gmem, scratch
        self.form, self.is_interpreted = problem.form, is_interpreted
        self.rows = padded_rows(problem.num_rows)
        self.halves = 2 if problem.form.is_gated else 1
        self.columns = tile.out_block // self.halves  # of the result, an item
        self.num_items = problem.out_channels // self.columns
        self.num_clusters = min(tile.num_clusters, self.num_items)
        self.num_steps = problem.in_channels // tile.k_split // tile.in_block
        self.cluster = lax.axis_index("cluster")
        self.rank = lax.axis_index("rank")
        # A traced zero: slices that reach over the last row are legal only where the start is not known. What is beyond
        # reads as zero, and is not written.
        self.first_row = jnp.minimum(self.rank, 0)

    def for_each_item(self, step, carry):
        """`step(item, carry)` for the cluster's items."""
        num_mine = lax.div(self.num_items - self.cluster + (self.num_clusters - 1), self.num_clusters)
        return lax.fori_loop(0, num_mine, lambda turn, c: step(self.cluster + turn * self.num_clusters, c), carry)

    def channels(self, step: jax.Array):
        """The channels in of this CTA's block `step`."""
        block = self.rank * self.num_steps + step
        return pl.ds(pl.multiple_of(block * self.tile.in_block, self.tile.in_block), self.tile.in_block)

    def outputs(self, item: jax.Array, half: int = 0):
        """The weights' outputs of an item; of gated weights the gates (half 0) or the ups (half 1)."""
        first = item * self.columns + half * self.problem.out_channels
        return pl.ds(pl.multiple_of(first, UNIT), self.columns)

    def all_rows(self):
        """All rows, and those that fill the last group of eight."""
        return pl.ds(pl.multiple_of(self.first_row, 8), self.rows)

    # --- producer

    def produce_all(self) -> None:
        def item_step(item, stage):
            def step(index, stage):
                plgpu.barrier_wait(self.scratch["empty"].at[stage])
                self.copy_weights(item, index, stage)
                self.copy_rows(index, stage)
                return self.next_stage(stage)

            return lax.fori_loop(jnp.where(item == self.cluster, num_early, 0), self.num_steps, step, stage)

        num_early = min(self.tile.num_stages, self.num_steps) if self.tile.early_weights else 0
        for index in range(num_early):
            self.copy_weights(self.cluster, jnp.int32(index), index)
        self.await_inputs()
        for index in range(num_early):
            self.copy_rows(jnp.int32(index), index)
        self.for_each_item(item_step, jnp.int32(num_early % self.tile.num_stages))
        for stage in range(self.tile.num_stages):  # nobody leaves while the consumer still reads
            plgpu.barrier_wait(self.scratch["empty"].at[stage])

    def await_inputs(self) -> None:
        """Waits for the kernel in front of this one, if this one may have started before it was done."""
        if self.tile.early_weights and not self.is_interpreted:
            plgpu.griddepcontrol_wait()

    def copy_weights(self, item: jax.Array, index: jax.Array, stage) -> None:
        for half in range(self.halves):
            place = (self.channels(index), self.outputs(item, half))
            plgpu.copy_gmem_to_smem(
                self.gmem.w.at[place[::-1] if self.form.is_out_major else place],
                self.scratch["w_smem"].at[stage, half],
                self.scratch["full"].at[stage],
            )

    def copy_rows(self, index: jax.Array, stage) -> None:
        channels, full = self.channels(index), self.scratch["full"].at[stage]
        plgpu.copy_gmem_to_smem(self.gmem.x.at[self.all_rows(), channels], self.scratch["x_smem"].at[stage], full)
        if self.form.norm_eps is not None:
            plgpu.copy_gmem_to_smem(self.gmem.norm_weight.at[channels], self.scratch["g_smem"].at[stage], full)

    def next_stage(self, stage: jax.Array) -> jax.Array:
        return jnp.where(stage == self.tile.num_stages - 1, 0, stage + 1)

    # --- consumer

    def consume_all(self) -> None:
        num_early = min(self.tile.num_stages, self.num_steps) if self.tile.early_weights else 0
        for stage in range(num_early, self.tile.num_stages):
            plgpu.barrier_arrive(self.scratch["empty"].at[stage])
        self.await_inputs()
        self.for_each_item(self.consume, jnp.int32(0))

    def consume(self, item: jax.Array, stage: jax.Array) -> jax.Array:
        if self.problem.has_residual:

            @pl.when(self.rank == 0)
            def _():
                plgpu.copy_gmem_to_smem(
                    self.gmem.residual.at[self.all_rows(), self.outputs(item)],
                    self.scratch["residual_smem"],
                    self.scratch["residual_full"],
                )

        squares = None
        if self.form.norm_eps is not None:
            squares = plgpu.layout_cast(jnp.zeros((UNIT, self.rows), jnp.float32), plgpu.Layout.WGMMA_TRANSPOSED)

        def scope(*acc_refs):
            def step(index, carry):
                stage, squares = carry
                plgpu.barrier_wait(self.scratch["full"].at[stage])
                if squares is not None:
                    squares = self.weigh_rows(stage, squares)
                rows = self.scratch["x_smem"].at[stage].transpose((1, 0))
                for half, acc_ref in enumerate(acc_refs):
                    weights = self.scratch["w_smem"].at[stage, half]
                    plgpu.wgmma(acc_ref, weights if self.form.is_out_major else weights.transpose((1, 0)), rows)
                # One block's products run while the next one's rows are weighed: only then is its stage given back.
                plgpu.wgmma_wait(self.halves)
                release(stage, index > 0)
                return self.next_stage(stage), squares

            def release(after: jax.Array, is_used: jax.Array) -> None:
                @pl.when(is_used)
                def _():
                    before = jnp.where(after == 0, self.tile.num_stages - 1, after - 1)
                    plgpu.barrier_arrive(self.scratch["empty"].at[before])

            stage_after, squares_after = lax.fori_loop(0, self.num_steps, step, (stage, squares))
            sums = [acc_ref[...] for acc_ref in acc_refs]
            release(stage_after, jnp.bool_(True))
            return sums, (stage_after, squares_after)

        acc_types = [plgpu.ACC((self.columns, self.rows), jnp.float32)] * self.halves
        sums, (stage, squares) = pl.run_scoped(scope, *acc_types)
        if squares is not None:
            squares = squares.sum(axis=0)
        if self.tile.k_split == 1:
            self.finish(item, sums, squares)
        else:
            self.combine(item, sums, squares)
        return stage

    def weigh_rows(self, stage: jax.Array, squares: jax.Array) -> jax.Array:
        """Multiplies a block of rows by the norm's weight, in shared memory; `squares` plus those of the block."""
        placed = plgpu.Layout.WGMMA_TRANSPOSED
        for first in range(0, self.tile.in_block, UNIT):
            block = self.scratch["x_smem"].at[stage, :, pl.ds(first, UNIT)].transpose((1, 0))
            rows = plgpu.load(block, layout=placed).astype(jnp.float32)
            weight = plgpu.load(self.scratch["g_smem"].at[stage, pl.ds(first, UNIT)], layout=placed.reduce(1))
            weight = lax.broadcast_in_dim(weight.astype(jnp.float32), rows.shape, [0])
            block[...] = (rows * weight).astype(jnp.bfloat16)
            squares = squares + rows * rows
        plgpu.commit_smem()
        return squares

    def part(self, item: jax.Array, rank, half: int):
        """Where the sums of a CTA lie in `parts`."""
        first = ((item * self.tile.k_split + rank) * self.halves + half) * self.columns
        return pl.ds(pl.multiple_of(first, UNIT), self.columns)

    def combine(self, item: jax.Array, sums: list, squares: jax.Array | None) -> None:
        """The first CTA of the cluster adds the others' sums to its own, in their order, and finishes the item."""
        gmem = self.gmem

        @pl.when(self.rank > 0)
        def _():
            for half, part in enumerate(sums):
                gmem.parts.at[self.part(item, self.rank, half)][...] = part
            if squares is not None:
                gmem.squares.at[item * self.tile.k_split + self.rank][...] = squares
            self.fence()
            plgpu.commit_smem()  # all threads have stored before one of them arrives

        plgpu.barrier_arrive(self.scratch["summed"])
        plgpu.barrier_wait(self.scratch["summed"])

        @pl.when(self.rank == 0)
        def _():
            self.fence()
            total, total_squares = list(sums), squares
            for rank in range(1, self.tile.k_split):
                for half in range(self.halves):
                    place = gmem.parts.at[self.part(item, rank, half)]
                    total[half] = total[half] + plgpu.load(place, layout=plgpu.Layout.WGMMA, optimized=False)
                if total_squares is not None:
                    total_squares = total_squares + plgpu.load(
                        gmem.squares.at[item * self.tile.k_split + rank],
                        layout=plgpu.Layout.WGMMA_TRANSPOSED.reduce(0),
                        optimized=False,
                    )
            self.finish(item, total, total_squares)

    def fence(self) -> None:
        """Orders stores to device memory before the cluster's barrier, and loads from it behind."""
        if self.is_interpreted:
            return

        @plgpu.inline_mgpu()
        def fence(ctx):  # noqa: ARG001
            mgpu.utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)

        fence()

    def finish(self, item: jax.Array, sums: list, squares: jax.Array | None) -> None:
        """The norm's factor, the gates, the residual; the result leaves through shared memory."""
        scratch = self.scratch
        if squares is not None:
            scale = lax.rsqrt(squares * (1.0 / self.problem.in_channels) + self.form.norm_eps)
            scratch["scale_smem"][...] = scale
            plgpu.commit_smem()
            scale = plgpu.load(scratch["scale_smem"], layout=plgpu.Layout.WGMMA.reduce(0))
            sums = [part * lax.broadcast_in_dim(scale, part.shape, [1]) for part in sums]
        out = sums[0]
        if self.form.is_gated:
            out = out / (1.0 + jnp.exp(-out)) * sums[1]
        out = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
        if self.problem.has_residual:
            plgpu.barrier_wait(scratch["residual_full"])
            residual = plgpu.load(
                scratch["residual_smem"].transpose((1, 0)), layout=plgpu.Layout.WGMMA_TRANSPOSED, optimized=False
            )
            out = out + residual.astype(jnp.float32)
        out_smem = scratch["out_smem"]
        out_smem.transpose((1, 0))[...] = out.astype(out_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, self.gmem.out.at[self.all_rows(), self.outputs(item)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
