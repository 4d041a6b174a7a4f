"""The Hopper kernel for wide latent values (MLA 512+64), whose sums do not fit into one warpgroup's registers.

Three warpgroups a CTA: a producer, and two that attend. Each of the two owns one half of the value channels, and the
scores of every other block. The owner of a block computes its scores and softmax weights, and leaves the weights and
the rows' new maxima in shared memory for its peer; then both add the block's product to their own half of the sums.
Nothing is computed twice, and keys are read from device memory once.

Two blocks of 64 positions are all that fits beside the queries. A block therefore comes and goes in pieces of its
channels: scores start with the first piece that has come, and a piece is loaded anew as soon as its last reader is
done. The channels behind the values (rotary) are needed for scores only: their place then takes the weights.

Results leave the registers for device memory directly. Rows of an item are TILE apart there. The parts of an item that
several CTAs hold are normalised and left for `mosaic_gpu_combine`.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.paged_attention.mosaic_gpu_common import (
    COLUMNS,
    MASKED,
    Refs,
    attended,
    item_rows,
    note_cut,
    part_rows,
    part_types,
    produce,
    refs_from,
    unmasked_end,
    visible,
)
from kernels_pallas.paged_attention.mosaic_gpu_pieces import NUM_HALVES, NUM_STAGES, SUB_BLOCK, Pieces
from kernels_pallas.paged_attention.mosaic_gpu_schedule import TILE, Layout, Part, Share, for_each_part, own_share

_PRODUCER = NUM_HALVES
_PER_ROW = plgpu.Layout.WGMMA.reduce(1)


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
    pieces = Pieces(layout)
    num_barriers = NUM_STAGES * pieces.num_all

    def body(*refs, **scratch):
        gmem = refs_from(refs, has_bits=bits is not None, is_latent=True)
        if interpret is None:
            plgpu.griddepcontrol_launch_dependents()  # the combine may come as soon as there is room
        share = own_share(layout, gmem.lens, lax.axis_index("cta"))
        warpgroup = lax.axis_index("wg")
        for index in range(NUM_HALVES):

            @pl.when(warpgroup == index)
            def _(index=index):
                plgpu.set_max_registers(240, action="increase")
                _Half(layout, scale, gmem, scratch, index, interpret is not None).run(share)

        @pl.when(warpgroup == _PRODUCER)
        def _():
            plgpu.set_max_registers(24, action="decrease")
            empty = [scratch["k_empty"].at[index] for index in range(num_barriers)]
            produce(layout, gmem, share, pieces.copies(gmem, scratch), jnp.int32(0), empty)

    body.__name__ = "paged_attention_mosaic_gpu_latent"
    transforms = (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(COLUMNS * 2))
    scratch_types = {
        "q_smem": plgpu.SMEM((1, TILE, layout.k_channels), q.dtype, transforms=transforms),
        "k_smem": plgpu.SMEM((NUM_STAGES * pieces.num, SUB_BLOCK, pieces.channels), k.dtype, transforms=transforms),
        "tail_smem": plgpu.SMEM((NUM_STAGES, SUB_BLOCK, pieces.tail_channels), k.dtype, transforms=transforms),
        "rows_smem": plgpu.SMEM((3 * NUM_HALVES, TILE), jnp.float32),  # the halves' maxima, totals, and flags
        "q_full": plgpu.Barrier(),
        "q_empty": plgpu.Barrier(),
        "k_full": plgpu.Barrier(num_arrivals=max(1, SUB_BLOCK // layout.page_size), num_barriers=num_barriers),
        "k_empty": plgpu.Barrier(num_barriers=num_barriers),
        "weight_full": plgpu.Barrier(num_barriers=NUM_HALVES),
        "total_full": plgpu.Barrier(num_barriers=NUM_HALVES),
    }
    kernel = plgpu.kernel(
        body,
        out_type=part_types(layout),
        scratch_types=scratch_types,
        grid=(layout.num_ctas,),
        grid_names=("cta",),
        num_threads=NUM_HALVES + 1,
        thread_name="wg",
        # Lane semantics: layouts are what this file says they are; inferring them can take minutes. No reduction here
        # crosses warps, so none needs shared memory. No warpgroup reads what it writes but in `clean`, where each
        # thread reads and writes the same places: barriers are where this file puts them.
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,
            unsafe_no_auto_barriers=True,
        ),
        interpret=interpret,
    )
    return kernel(lens_B, table, *([] if bits is None else [bits]), q, k, out_ref)


_TURNS = 4


def _next_turn(turn: jax.Array) -> jax.Array:
    return jnp.where(turn == _TURNS - 1, 0, turn + 1)


def _hidden_zero(turn: jax.Array) -> jax.Array:
    """0, but not to the compiler, which would keep the addresses of all pieces over the loop, in local memory.

    It must see that all threads have the same: addresses of operands are computed in uniform registers then.
    """
    return jnp.minimum(turn, 0)


class _Half:
    """A warpgroup that attends: one half of the value channels, and the scores of every other block."""

    def __init__(self, layout: Layout, scale: float, gmem: Refs, scratch: dict, index: int, is_interpreted: bool):
        self.layout, self.gmem, self.scratch, self.is_interpreted = layout, gmem, scratch, is_interpreted
        self.index, self.peer = index, 1 - index
        self.pieces = Pieces(layout)
        self.scale_log2 = scale * math.log2(math.e)
        self.cta = lax.axis_index("cta")

    def run(self, share: Share) -> None:
        scratch = self.scratch
        for stage in range(NUM_STAGES):
            for piece in self.pieces.of_half(self.index):
                plgpu.barrier_arrive(scratch["k_empty"].at[self.pieces.barrier(stage, piece)])
        plgpu.barrier_arrive(scratch["k_empty"].at[self.pieces.barrier(self.peer, self.pieces.num)])
        if self.index == 0:
            self.gmem.cuts[2 * self.cta] = jnp.int32(-1)
        else:
            plgpu.barrier_arrive(scratch["q_empty"])
        for_each_part(self.layout, self.gmem.lens, share, self.attend_part, jnp.int32(0))
        if self.index == 0:  # nobody leaves while the other still reads
            plgpu.barrier_wait(scratch["q_empty"])

    def attend_part(self, part: Part, count: jax.Array) -> jax.Array:
        layout, scratch = self.layout, self.scratch
        if self.index == 0:
            plgpu.barrier_wait(scratch["q_empty"])
            plgpu.commit_smem()  # no warp may still be scoring with the queries of the part before
            plgpu.copy_gmem_to_smem(
                self.gmem.q.at[item_rows(part.item, layout.tile_rows)],
                scratch["q_smem"].at[0, pl.ds(0, layout.tile_rows)],
                scratch["q_full"],
            )
        plgpu.barrier_wait(scratch["q_full"])
        zeros = plgpu.layout_cast(jnp.zeros((TILE, self.pieces.channels), jnp.float32), plgpu.Layout.WGMMA)
        top = plgpu.layout_cast(jnp.full((TILE,), MASKED, jnp.float32), _PER_ROW)
        total = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), _PER_ROW)
        plain_end = unmasked_end(layout, part)

        def pair(block: jax.Array, carry):
            return self.attend_pair(part, block, block >= plain_end, carry)

        carry = (jnp.int32(0), (zeros,) * self.pieces.per_half, top, total)
        _, *sums_and_rows = lax.fori_loop(part.first, part.last, pair, carry)
        self.finish(part, *sums_and_rows)
        return count

    def attend_pair(self, part: Part, block: jax.Array, is_masked: jax.Array, carry):
        """Two sub-blocks, each scored by one half and added by both. Not all rows may attend all of a masked pair."""
        turn, sums, top, total = carry
        zero = _hidden_zero(turn)
        scores = self.scores(zero)
        if self.index == 0:
            weights, first_top, decay, share = self.publish(part, block, is_masked, zero, scores, top)
            total = total * decay + share
            sums = self.add(part, block, is_masked, zero, 0, sums, weights, decay)
            weights, second_top = self.receive(zero)
            decay = jnp.exp2(first_top - second_top)
            total = total * decay
        else:
            first_weights, first_top = self.receive(zero)
            first_decay = jnp.exp2(top - first_top)
            # The peer waits for these weights: they come before this half's own products.
            weights, second_top, decay, share = self.publish(part, block, is_masked, zero, scores, first_top)
            total = total * first_decay * decay + share
            sums = self.add(part, block, is_masked, zero, 0, sums, first_weights, first_decay)
        sums = self.add(part, block, is_masked, zero, 1, sums, weights, decay)
        return _next_turn(turn), sums, second_top, total

    def scores(self, zero: jax.Array):
        """Queries times the keys of the block in this half's stage, piece by piece as they come."""

        def scope(acc_ref):
            for piece in self.pieces.order:
                first, channels = self.pieces.span(piece)
                if not channels:
                    continue
                plgpu.barrier_wait(self.scratch["k_full"].at[self.pieces.barrier(self.index, piece)])
                queries = self.scratch["q_smem"].at[zero, :, pl.ds(first, channels)]
                plgpu.wgmma(
                    acc_ref, queries, self.pieces.smem(self.scratch, zero + self.index, piece).transpose((1, 0))
                )
            return acc_ref[...]

        return pl.run_scoped(scope, plgpu.ACC((TILE, SUB_BLOCK), jnp.float32))

    def publish(self, part: Part, block, is_masked, zero, scores, top):
        """Of this half's sub-block: weights, for the peer too, the rows' new maxima, their decay, the weights' sums."""
        scratch = self.scratch
        first = block * self.layout.block + self.index * SUB_BLOCK
        scores = lax.cond(
            is_masked, lambda scores: self.mask(part, first, scores), lambda scores: scores, scores * self.scale_log2
        )
        new_top = jnp.maximum(top, scores.max(axis=1))
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
        rounded = weights.astype(scratch["tail_smem"].dtype)
        scratch["tail_smem"].at[zero + self.index, :, pl.ds(0, SUB_BLOCK)][...] = rounded
        scratch["rows_smem"].at[self.index][...] = new_top
        plgpu.commit_smem()  # keys will follow in the weights' place
        plgpu.barrier_arrive(scratch["weight_full"].at[self.index])
        return rounded, new_top, jnp.exp2(top - new_top), weights.sum(axis=1)

    def mask(self, part: Part, first: jax.Array, scores):
        """The scores, far below `MASKED` where a row does not attend a position; notes whether all keys are finite.

        A key that is not finite makes every row's score so, that of the first row for certain a query's.
        """
        not_finite = (scores - scores).sum(axis=1)  # 0, or NaN
        self.scratch["rows_smem"].at[2 * NUM_HALVES + self.index][...] = not_finite
        is_visible = visible(self.layout, self.gmem.bits, part, first, SUB_BLOCK)
        return jnp.where(is_visible, scores, 2 * MASKED)

    def receive(self, zero: jax.Array):
        """The weights of the block in the peer's stage, whose tail is then free, and the rows' new maxima."""
        scratch = self.scratch
        plgpu.barrier_wait(scratch["weight_full"].at[self.peer])
        weights = plgpu.load(
            scratch["tail_smem"].at[zero + self.peer, :, pl.ds(0, SUB_BLOCK)], layout=plgpu.Layout.WGMMA
        )
        new_top = plgpu.load(scratch["rows_smem"].at[self.peer], layout=_PER_ROW)
        plgpu.barrier_arrive(scratch["k_empty"].at[self.pieces.barrier(self.peer, self.pieces.num)])
        return weights, new_top

    def add(self, part: Part, block, is_masked, zero, stage: int, sums, weights, decay):
        """sums * decay + weights @ values, piece by piece of this half, each of which is then free."""
        pieces = self.pieces.of_half(self.index)
        values = [self.pieces.smem(self.scratch, zero + stage, piece) for piece in pieces]

        def clean_if_needed(_, carry):
            not_finite = self.scratch["rows_smem"][2 * NUM_HALVES + stage, 0]
            return lax.fori_loop(0, jnp.int32(not_finite != 0.0), clean, carry)

        def clean(_, carry):
            self.clean(part, block * self.layout.block + stage * SUB_BLOCK, zero, stage)
            return carry

        lax.fori_loop(0, jnp.int32(is_masked), clean_if_needed, jnp.int32(0))
        sums = tuple(piece * lax.broadcast_in_dim(decay, piece.shape, [0]) for piece in sums)
        sums = self.add_products(sums, weights, values)
        for piece in pieces:
            plgpu.barrier_arrive(self.scratch["k_empty"].at[self.pieces.barrier(stage, piece)])
        return sums

    def add_products(self, sums, weights, values):
        """Each piece of the sums + weights @ its values, the sums staying where they are."""
        if self.is_interpreted:  # the interpreter has no accumulators that start from a value
            return tuple(
                piece + jnp.dot(weights, value[...], preferred_element_type=jnp.float32)
                for piece, value in zip(sums, values, strict=True)
            )

        def add(acc_refs):
            for acc_ref, value in zip(acc_refs, values, strict=True):
                plgpu.wgmma(acc_ref, weights, value)

        return pl.run_state(add)(tuple(plgpu.ACC.init(piece) for piece in sums))

    def clean(self, part: Part, first: jax.Array, zero: jax.Array, stage: int) -> None:
        """Zeroes values that nobody attends and values that are not finite: 0 * NaN would carry them to every row.

        An attended one that is not finite shows in the scores already, since the values are the keys.
        """
        is_attended = attended(self.layout, part, first, (SUB_BLOCK, COLUMNS), plgpu.Layout.WGMMA)

        def clean_piece(piece, carry):
            place = self.scratch["k_smem"].at[(zero + stage) * self.pieces.num + piece]
            for column in range(0, self.pieces.channels, COLUMNS):
                value_ref = place.at[:, pl.ds(column, COLUMNS)]
                value = plgpu.load(value_ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
                is_finite = value - value == 0.0
                value = jnp.where(is_attended, jnp.where(is_finite, value, 0.0), 0.0)
                value_ref[...] = value.astype(value_ref.dtype)
            return carry

        pieces = self.pieces.of_half(self.index)
        lax.fori_loop(pieces.start, pieces.stop, clean_piece, jnp.int32(0))
        plgpu.commit_smem()

    def finish(self, part: Part, sums, top, total) -> None:
        """Writes this half of the part: to the output if it is a whole item, else beside it, for the combine."""
        gmem, scratch = self.gmem, self.scratch
        scratch["rows_smem"].at[NUM_HALVES + self.index][...] = total
        plgpu.barrier_arrive(scratch["total_full"].at[self.index])
        plgpu.barrier_wait(scratch["total_full"].at[self.peer])
        total = total + plgpu.load(scratch["rows_smem"].at[NUM_HALVES + self.peer], layout=_PER_ROW)
        if self.index == 1:
            plgpu.barrier_arrive(scratch["q_empty"])
        is_empty = total == 0.0
        total = jnp.where(is_empty, 1.0, total)
        factor = 1.0 / total
        sums = [piece * lax.broadcast_in_dim(factor, piece.shape, [0]) for piece in sums]
        columns = [pl.ds(*self.pieces.span(piece)) for piece in self.pieces.of_half(self.index)]
        is_whole = part.first_cta == part.last_cta

        @pl.when(is_whole)
        def _():
            for piece, where in zip(sums, columns, strict=True):
                gmem.out.at[item_rows(part.item, TILE), where][...] = piece.astype(gmem.out.dtype)

        @pl.when(jnp.logical_not(is_whole))
        def _():
            for piece, where in zip(sums, columns, strict=True):
                gmem.parts.at[part_rows(part, self.cta), where][...] = piece
            if self.index == 0:
                gmem.lse.at[part_rows(part, self.cta)][...] = jnp.where(is_empty, MASKED, top + jnp.log2(total))

        if self.index == 0:
            note_cut(gmem, part, self.cta)
