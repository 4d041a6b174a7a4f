"""The Hopper kernel for wide latent values (MLA 512+64), whose sums do not fit into one warpgroup's registers.

Four warpgroups a CTA. The producer streams blocks of keys into a ring. The score warpgroup computes the scores of a
block, its softmax weights and the factor by which earlier sums decay, and hands both over through shared memory; it
starts a block's scores before the softmax of the one before, so the matrix units have work meanwhile. Two value
warpgroups hold the sums of half of the channels each, 64 x 256 float32 at most, and add a block's product when its
weights come. Nothing is computed twice, and no warpgroup waits for its equal.

Results leave the registers for device memory directly: shared memory is full of keys. Rows of an item are TILE apart
there. The parts of an item that several CTAs hold are normalised and left for `mosaic_gpu_combine`.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.paged_attention.mosaic_gpu_common import (
    MASKED,
    Refs,
    attended,
    item_rows,
    next_stage,
    note_cut,
    part_rows,
    part_types,
    produce,
    refs_from,
    unmasked_end,
    visible,
)
from kernels_pallas.paged_attention.mosaic_gpu_schedule import TILE, Layout, Part, for_each_part

NUM_VALUE_WARPGROUPS = 2
_PIECES = 2  # of a value warpgroup's sums: one product of all its channels would not compile for 512 threads
_POSITIONS_BY_CHANNELS = plgpu.Layout.TILED(  # 32 positions: 8 a warp, their channels over the lanes in pairs
    plgpu.Tiling(((32, 8), (8, 8), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
_SCORE, _PRODUCER = NUM_VALUE_WARPGROUPS, NUM_VALUE_WARPGROUPS + 1


def attend_latent(
    layout: Layout,
    scale: float,
    lens_B: jax.Array,
    table: jax.Array,
    bits: jax.Array | None,
    q: jax.Array,
    k: jax.Array,
    out_ref: jax.Ref,
    *,
    interpret: object = None,
) -> tuple[jax.Array, ...]:
    """Fills `out_ref` with the items that one CTA holds whole; returns the parts of the others, as in `Refs`."""

    def body(*refs, **scratch):
        gmem = refs_from(refs, has_bits=bits is not None, is_latent=True)
        if interpret is None:
            plgpu.griddepcontrol_launch_dependents()  # the combine may come as soon as there is room
        warpgroup = lax.axis_index("wg")
        for index in range(NUM_VALUE_WARPGROUPS):

            @pl.when(warpgroup == index)
            def _(index=index):
                plgpu.set_max_registers(168, action="increase")
                _Values(layout, gmem, scratch, index, interpret is not None).run()

        @pl.when(warpgroup == _SCORE)
        def _():
            plgpu.set_max_registers(152, action="increase")
            _Scores(layout, scale, gmem, scratch, interpret is not None).run()

        @pl.when(warpgroup == _PRODUCER)
        def _():
            plgpu.set_max_registers(24, action="decrease")
            produce(layout, gmem, scratch)

    body.__name__ = "paged_attention_mosaic_gpu_latent"
    columns = _columns(layout)
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * 2))
    handovers = num_handovers(layout.block)
    stages = layout.num_stages
    scratch_types = {
        "q_smem": plgpu.SMEM((1, TILE, layout.k_channels), q.dtype, transforms=transforms),
        "k_smem": plgpu.SMEM((stages, layout.block, layout.k_channels), k.dtype, transforms=transforms),
        "weight_smem": plgpu.SMEM((handovers, TILE, layout.block), q.dtype, transforms=transforms),
        "decay_smem": plgpu.SMEM((handovers, TILE), jnp.float32),
        "total_smem": plgpu.SMEM((TILE,), jnp.float32),
        "q_full": plgpu.Barrier(),
        "k_full": plgpu.Barrier(num_arrivals=max(1, layout.block // layout.page_size), num_barriers=stages),
        "k_empty": plgpu.Barrier(num_arrivals=NUM_VALUE_WARPGROUPS, num_barriers=stages),
        "weight_full": plgpu.Barrier(num_barriers=handovers),
        "weight_empty": plgpu.Barrier(num_arrivals=NUM_VALUE_WARPGROUPS, num_barriers=handovers),
        "total_full": plgpu.Barrier(),
        "total_empty": plgpu.Barrier(num_arrivals=NUM_VALUE_WARPGROUPS),
    }
    kernel = plgpu.kernel(
        body,
        out_type=part_types(layout),
        scratch_types=scratch_types,
        grid=(layout.num_ctas,),
        grid_names=("cta",),
        num_threads=NUM_VALUE_WARPGROUPS + 2,
        thread_name="wg",
        # Lane semantics: layouts are what this file says they are; inferring them can take minutes. No reduction here
        # crosses warps, so none needs shared memory, of which there is none left. No warpgroup reads what it writes but
        # in `clean`, where each thread reads and writes the same places: barriers are where this file puts them.
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,
            unsafe_no_auto_barriers=True,
        ),
        interpret=interpret,
    )
    return kernel(lens_B, table, *([] if bits is None else [bits]), q, k, out_ref)


def num_handovers(block: int) -> int:
    """Blocks of weights that may lie between the warpgroups: what fits beside the ring."""
    return 2 if block <= 32 else 1


def _columns(layout: Layout) -> int:
    """bf16 channels in one swizzled line: a product over 32 positions needs tiles of 32."""
    return min(layout.block, 64)


def _next(layout: Layout, handover: jax.Array) -> jax.Array:
    return 1 - handover if num_handovers(layout.block) == 2 else handover


class _Scores:
    """The score warpgroup."""

    def __init__(self, layout: Layout, scale: float, gmem: Refs, scratch: dict, is_interpreted: bool):
        self.layout, self.gmem, self.scratch = layout, gmem, scratch
        # The interpreter has no A operand in registers.
        self.num_held = 0 if is_interpreted else layout.register_channels
        self.held = None
        self.scale_log2 = scale * math.log2(math.e)
        self.cta = lax.axis_index("cta")

    def run(self) -> None:
        self.gmem.cuts[2 * self.cta] = jnp.int32(-1)
        zero = jnp.int32(0)
        for_each_part(self.layout, self.gmem.lens, self.cta, self.attend_part, (zero, zero))
        for index in range(num_handovers(self.layout.block)):  # nobody leaves while a value warpgroup still reads
            plgpu.barrier_wait(self.scratch["weight_empty"].at[index])
        plgpu.barrier_wait(self.scratch["total_empty"])

    def attend_part(self, part: Part, carry):
        layout, scratch = self.layout, self.scratch
        plgpu.commit_smem()  # no warp may still be scoring with the queries of the part before
        plgpu.copy_gmem_to_smem(
            self.gmem.q.at[item_rows(part.item, layout.tile_rows)],
            scratch["q_smem"].at[0, pl.ds(0, layout.tile_rows)],
            scratch["q_full"],
        )
        plgpu.barrier_wait(scratch["q_full"])
        if self.num_held:
            held = scratch["q_smem"].at[0, :, pl.ds(0, self.num_held)]
            self.held = plgpu.load(held, layout=plgpu.Layout.WGMMA)
        stage, handover = carry
        scores = pl.run_scoped(lambda *acc_refs: self.whole(acc_refs, stage), *self.accumulators())
        per_row = plgpu.Layout.WGMMA.reduce(1)
        top = plgpu.layout_cast(jnp.full((TILE,), MASKED, jnp.float32), per_row)
        total = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), per_row)
        carry = (stage, handover, scores, top, total)
        last = part.last - 1
        unmasked = jnp.minimum(unmasked_end(layout, part), last)
        carry = lax.fori_loop(part.first, unmasked, lambda j, c: self.step(part, j, c, is_masked=False), carry)
        carry = lax.fori_loop(unmasked, last, lambda j, c: self.step(part, j, c, is_masked=True), carry)
        stage, handover, scores, top, total = carry
        top, total = self.hand_over(part, last, handover, scores, top, total, is_masked=True)
        self.finish(part, top, total)
        return next_stage(layout, stage), _next(layout, handover)

    def accumulators(self) -> list:
        """Accumulators of a block's scores; their sum is the scores."""
        return [plgpu.ACC((TILE, self.layout.block), jnp.float32)] * self.layout.score_chains

    def whole(self, acc_refs, stage: jax.Array):
        """The scores of the block in a stage."""
        plgpu.barrier_wait(self.scratch["k_full"].at[stage])
        self.add_scores(acc_refs, stage, 0, self.layout.k_channels)
        return sum(acc_ref[...] for acc_ref in acc_refs)

    def add_scores(self, acc_refs, stage: jax.Array, first: int, end: int) -> None:
        """Starts the products over channels `first`..`end` - 1, in turn on the accumulators."""
        step = end - first if len(acc_refs) == 1 else _columns(self.layout)
        for turn, start in enumerate(range(first, end, step)):
            self.add_product(acc_refs[turn % len(acc_refs)], stage, start, start + step)

    def add_product(self, acc_ref, stage: jax.Array, first: int, end: int) -> None:
        """Starts one product: of queries in registers as far as they are held there, else from shared memory."""
        if first < self.num_held:
            middle = min(end, self.num_held)
            plgpu.wgmma(acc_ref, self.held[:, first:middle], self.keys(stage, first, middle))
            first = middle
        if first == end:
            return
        # 0, but not to the compiler: it would keep all query pieces' addresses over the loop, in local memory.
        zero = jnp.minimum(stage, 0)
        queries = self.scratch["q_smem"].at[zero, :, pl.ds(first, end - first)]
        plgpu.wgmma(acc_ref, queries, self.keys(stage, first, end))

    def keys(self, stage: jax.Array, first: int, end: int):
        return self.scratch["k_smem"].at[stage, :, pl.ds(first, end - first)].transpose((1, 0))

    def step(self, part: Part, block: jax.Array, carry, *, is_masked: bool):
        """Hands a block over whose scores are there, while those of the next one are computed."""
        stage, handover, scores, top, total = carry
        stage = next_stage(self.layout, stage)

        def overlapped(*acc_refs):
            # The products before the handover run during the softmax, those behind it after: the fewer before, the
            # earlier the weights come and their stage is free, the more before, the less the matrix units stand still.
            plgpu.barrier_wait(self.scratch["k_full"].at[stage])
            early = min(self.layout.early_channels, self.layout.k_channels - _columns(self.layout))
            self.add_scores(acc_refs, stage, 0, early)
            sums = self.hand_over(part, block, handover, scores, top, total, is_masked=is_masked)
            self.add_scores(acc_refs, stage, early, self.layout.k_channels)
            return sum(acc_ref[...] for acc_ref in acc_refs), *sums

        return stage, _next(self.layout, handover), *pl.run_scoped(overlapped, *self.accumulators())

    def hand_over(self, part: Part, block: jax.Array, handover: jax.Array, scores, top, total, *, is_masked: bool):
        """Gives a block's weights and the decay of the sums before it to the value warpgroups."""
        scratch = self.scratch
        scores = scores * self.scale_log2
        if is_masked:
            is_visible = visible(self.layout, self.gmem.bits, part, block)
            scores = jnp.where(is_visible, scores, MASKED)
        new_top = jnp.maximum(top, scores.max(axis=1))
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
        if is_masked:
            weights = jnp.where(is_visible, weights, 0.0)
        decay = jnp.exp2(top - new_top)
        plgpu.barrier_wait(scratch["weight_empty"].at[handover])
        scratch["weight_smem"].at[handover][...] = weights.astype(scratch["weight_smem"].dtype)
        scratch["decay_smem"].at[handover][...] = decay
        plgpu.barrier_arrive(scratch["weight_full"].at[handover])
        return new_top, total * decay + weights.sum(axis=1)

    def finish(self, part: Part, top, total) -> None:
        is_empty = total == 0.0
        plgpu.barrier_wait(self.scratch["total_empty"])
        self.scratch["total_smem"][...] = 1.0 / jnp.where(is_empty, 1.0, total)
        plgpu.barrier_arrive(self.scratch["total_full"])

        @pl.when(part.first_cta < part.last_cta)
        def _():
            lse = jnp.where(is_empty, MASKED, top + jnp.log2(jnp.where(is_empty, 1.0, total)))
            self.gmem.lse.at[part_rows(part, self.cta)][...] = lse

        note_cut(self.gmem, part, self.cta)


class _Values:
    """One value warpgroup: owns `channels` of the sums, from `first_channel` on."""

    def __init__(self, layout: Layout, gmem: Refs, scratch: dict, index: int, is_interpreted: bool):
        self.layout, self.gmem, self.scratch, self.is_interpreted = layout, gmem, scratch, is_interpreted
        self.channels = layout.v_channels // NUM_VALUE_WARPGROUPS
        self.first_channel = index * self.channels
        self.cta = lax.axis_index("cta")

    def run(self) -> None:
        for stage in range(self.layout.num_stages):
            plgpu.barrier_arrive(self.scratch["k_empty"].at[stage])
        for index in range(num_handovers(self.layout.block)):
            plgpu.barrier_arrive(self.scratch["weight_empty"].at[index])
        plgpu.barrier_arrive(self.scratch["total_empty"])
        zero = jnp.int32(0)
        for_each_part(self.layout, self.gmem.lens, self.cta, self.attend_part, (zero, zero))

    def attend_part(self, part: Part, carry):
        zeros = plgpu.layout_cast(jnp.zeros((TILE, self.channels // _PIECES), jnp.float32), plgpu.Layout.WGMMA)
        unmasked = unmasked_end(self.layout, part)
        carry = (*carry, (zeros,) * _PIECES)
        carry = lax.fori_loop(part.first, unmasked, lambda j, c: self.step(part, j, c, is_masked=False), carry)
        carry = lax.fori_loop(unmasked, part.last, lambda j, c: self.step(part, j, c, is_masked=True), carry)
        stage, handover, pieces = carry
        self.store(part, pieces)
        return stage, handover

    def step(self, part: Part, block: jax.Array, carry, *, is_masked: bool):
        stage, handover, pieces = carry
        scratch = self.scratch
        plgpu.barrier_wait(scratch["weight_full"].at[handover])
        if is_masked:
            self.clean(part, block, scratch["k_smem"].at[stage, :, pl.ds(self.first_channel, self.channels)])
        decay = plgpu.load(scratch["decay_smem"].at[handover], layout=plgpu.Layout.WGMMA.reduce(1))
        pieces = tuple(piece * lax.broadcast_in_dim(decay, piece.shape, [0]) for piece in pieces)
        values = [scratch["k_smem"].at[stage, :, columns] for columns in self.columns()]
        weights = plgpu.load(scratch["weight_smem"].at[handover], layout=plgpu.Layout.WGMMA)
        plgpu.barrier_arrive(scratch["weight_empty"].at[handover])
        pieces = self.add_products(pieces, weights, values)
        plgpu.barrier_arrive(scratch["k_empty"].at[stage])
        return next_stage(self.layout, stage), _next(self.layout, handover), pieces

    def columns(self) -> list:
        """Channels of each piece of the sums."""
        size = self.channels // _PIECES
        return [pl.ds(self.first_channel + index * size, size) for index in range(_PIECES)]

    def add_products(self, pieces, weights, values):
        """piece + weights @ its values, the sums staying where they are."""
        if self.is_interpreted:  # the interpreter has no accumulators that start from a value
            return tuple(
                piece + jnp.dot(weights, value[...], preferred_element_type=jnp.float32)
                for piece, value in zip(pieces, values, strict=True)
            )

        def add(acc_refs):
            for acc_ref, value in zip(acc_refs, values, strict=True):
                plgpu.wgmma(acc_ref, weights, value)

        return pl.run_state(add)(tuple(plgpu.ACC.init(piece) for piece in pieces))

    def clean(self, part: Part, block: jax.Array, values) -> None:
        """Zeroes values that nobody attends and values that are not finite: 0 * NaN would carry them to every row.

        An attended one that is not finite shows in the scores already, since the values are the keys.
        """
        columns = _columns(self.layout)
        is_attended = attended(self.layout, part, block, columns, _POSITIONS_BY_CHANNELS)
        for column in range(0, self.channels, columns):
            piece = values.at[:, pl.ds(column, columns)]
            value = plgpu.load(piece, layout=_POSITIONS_BY_CHANNELS).astype(jnp.float32)
            is_finite = value - value == 0.0
            piece[...] = jnp.where(is_attended, jnp.where(is_finite, value, 0.0), 0.0).astype(piece.dtype)
        plgpu.commit_smem()

    def store(self, part: Part, pieces) -> None:
        """Writes the part: to the output if it is a whole item, else beside it, for the combine."""
        gmem = self.gmem
        plgpu.barrier_wait(self.scratch["total_full"])
        factor = plgpu.load(self.scratch["total_smem"], layout=plgpu.Layout.WGMMA.reduce(1))
        plgpu.barrier_arrive(self.scratch["total_empty"])
        pieces = [piece * lax.broadcast_in_dim(factor, piece.shape, [0]) for piece in pieces]
        is_whole = part.first_cta == part.last_cta

        @pl.when(is_whole)
        def _():
            for piece, columns in zip(pieces, self.columns(), strict=True):
                gmem.out.at[item_rows(part.item, TILE), columns][...] = piece.astype(gmem.out.dtype)

        @pl.when(jnp.logical_not(is_whole))
        def _():
            for piece, columns in zip(pieces, self.columns(), strict=True):
                gmem.parts.at[part_rows(part, self.cta), columns][...] = piece
