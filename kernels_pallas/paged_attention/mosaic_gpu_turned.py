"""The Hopper kernel for latent values (MLA) and few packed rows: products turned round, so that no row is padding.

A matrix unit's tile has 64 rows whatever is asked. Here positions and channels take that side, and packed query rows
the other, which may be as short as 8: scores are keys x queries [positions, rows], sums values x weights [channels,
rows].

One producer warpgroup streams pages, one consumer holds up to 32 packed rows and all their sums. Weights go through
shared memory, being an operand that cannot come from registers; so do the rows' maxima, since the four warps of the
consumer have different positions.

The parts of an item that several CTAs hold are left as [channels, rows] for `mosaic_gpu_turned_combine`.
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
    next_stage,
    note_cut,
    page_piece,
    produce,
    refs_from,
    unmasked_end,
    visible_columns,
)
from kernels_pallas.paged_attention.mosaic_gpu_schedule import TILE, Layout, Part, Share, for_each_part, own_share

BLOCK = 64  # positions of a stage, and of a product
_CONSUMER, _PRODUCER = 0, 1
_PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def num_columns(layout: Layout) -> int:
    """Packed rows that there is room for."""
    return 16 if layout.tile_rows <= 16 else 32


def num_pieces(layout: Layout) -> int:
    """How many pieces a block's channels come in: scores start with the first."""
    return next(pieces for pieces in (3, 4, 2, 1) if layout.k_channels % (pieces * COLUMNS) == 0)


def part_types(layout: Layout) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Types of `Refs.parts` [parts * channels, rows], `lse` and `cuts`."""
    columns = num_columns(layout)
    return (
        jax.ShapeDtypeStruct((2 * layout.num_ctas * layout.v_channels, columns), jnp.float32),
        jax.ShapeDtypeStruct((2 * layout.num_ctas * columns,), jnp.float32),
        jax.ShapeDtypeStruct((2 * layout.num_ctas,), jnp.int32),
    )


def attend_turned(
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
    """Fills `out_ref` with the items that one CTA holds whole; returns the parts of the others."""
    columns, pieces, stages = num_columns(layout), num_pieces(layout), layout.num_stages

    def body(*refs, **scratch):
        gmem = refs_from(refs, has_bits=bits is not None, is_latent=True)
        if interpret is None:
            plgpu.griddepcontrol_launch_dependents()  # the combine may come as soon as there is room
        share = own_share(layout, gmem.lens, lax.axis_index("cta"))
        warpgroup = lax.axis_index("wg")

        @pl.when(warpgroup == _CONSUMER)
        def _():
            _Consumer(layout, scale, gmem, scratch, interpret is not None).run(share)

        @pl.when(warpgroup == _PRODUCER)
        def _():
            _produce(layout, gmem, share, scratch)

    body.__name__ = "paged_attention_mosaic_gpu_turned"
    transforms = (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(COLUMNS * 2))
    q_pieces = layout.k_channels // COLUMNS
    scratch_types = {
        "q_smem": plgpu.SMEM((q_pieces, columns, COLUMNS), q.dtype, transforms=transforms),
        "k_smem": plgpu.SMEM((stages * pieces, BLOCK, layout.k_channels // pieces), k.dtype, transforms=transforms),
        "weight_smem": plgpu.SMEM((columns, BLOCK), k.dtype, transforms=transforms),
        "flag_smem": plgpu.SMEM((columns,), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=q_pieces),
        "k_full": plgpu.Barrier(num_arrivals=max(1, BLOCK // layout.page_size), num_barriers=stages * pieces),
        "k_empty": plgpu.Barrier(num_barriers=stages),
    }
    kernel = plgpu.kernel(
        body,
        out_type=part_types(layout),
        scratch_types=scratch_types,
        grid=(layout.num_ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="wg",
        # Lane semantics: layouts are what this file says they are. Barriers are where this file puts them.
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=BLOCK * columns * 2,  # room for one step; no other warpgroup reduces over warps
            unsafe_no_auto_barriers=True,
        ),
        interpret=interpret,
    )
    return kernel(lens_B, table, *([] if bits is None else [bits]), q, k, out_ref)


def _produce(layout: Layout, gmem: Refs, share: Share, scratch: dict) -> None:
    pieces = num_pieces(layout)
    channels = layout.k_channels // pieces

    def copy_block(starts: tuple[jax.Array, ...], kv_head: jax.Array, stage: jax.Array) -> jax.Array:  # noqa: ARG001
        rows = BLOCK // len(starts)
        plgpu.barrier_wait(scratch["k_empty"].at[stage])
        for piece in range(pieces):
            for index, start in enumerate(starts):
                plgpu.copy_gmem_to_smem(
                    gmem.k.at[page_piece(start, rows), pl.ds(piece * channels, channels)],
                    scratch["k_smem"].at[stage * pieces + piece, pl.ds(index * rows, rows)],
                    scratch["k_full"].at[stage * pieces + piece],
                )
        return next_stage(layout, stage)

    empty = [scratch["k_empty"].at[stage] for stage in range(layout.num_stages)]
    produce(layout, gmem, share, copy_block, jnp.int32(0), empty)


class _Consumer:
    """The warpgroup that attends."""

    def __init__(self, layout: Layout, scale: float, gmem: Refs, scratch: dict, is_interpreted: bool):
        self.layout, self.gmem, self.scratch, self.is_interpreted = layout, gmem, scratch, is_interpreted
        self.scale_log2 = scale * math.log2(math.e)
        self.cta = lax.axis_index("cta")
        self.columns = num_columns(layout)  # those past the item's rows are padding
        self.pieces = num_pieces(layout)
        self.q_pieces = layout.k_channels // COLUMNS
        self.v_pieces = layout.v_channels // COLUMNS

    def run(self, share: Share) -> None:
        self.gmem.cuts[2 * self.cta] = jnp.int32(-1)
        for stage in range(self.layout.num_stages):
            plgpu.barrier_arrive(self.scratch["k_empty"].at[stage])
        for_each_part(self.layout, self.gmem.lens, share, self.attend_part, jnp.int32(0))

    def queries(self, piece):
        """[rows, 64 channels]."""
        return self.scratch["q_smem"].at[piece]

    def keys(self, stage, piece: int):
        """[positions, 64 channels] of a stage."""
        of_piece, column = divmod(piece, self.q_pieces // self.pieces)
        return self.scratch["k_smem"].at[stage * self.pieces + of_piece, :, pl.ds(column * COLUMNS, COLUMNS)]

    def attend_part(self, part: Part, stage: jax.Array) -> jax.Array:
        layout, rows = self.layout, self.layout.tile_rows
        for piece in range(self.q_pieces):
            plgpu.copy_gmem_to_smem(
                self.gmem.q.at[item_rows(part.item, rows), pl.ds(piece * COLUMNS, COLUMNS)],
                self.queries(piece).at[pl.ds(0, rows)],
                self.scratch["q_full"],
            )
        plgpu.barrier_wait(self.scratch["q_full"])
        shape = (TILE, self.columns)
        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        top = plgpu.layout_cast(jnp.full((self.columns,), MASKED, jnp.float32), _PER_COLUMN)
        plain_end = unmasked_end(layout, part)

        def step(block, carry):
            return self.attend_block(part, block, block >= plain_end, carry)

        carry = (stage, (zeros,) * self.v_pieces, top, zeros)
        stage, sums, top, share = lax.fori_loop(part.first, part.last, step, carry)
        self.finish(part, sums, top, share)
        return stage

    def attend_block(self, part: Part, block, is_masked, carry):
        stage, sums, top, total = carry
        scratch = self.scratch
        zero = jnp.minimum(stage, 0)  # 0, but not to the compiler: it would keep all addresses over the loop
        scores = self.scores(stage, zero) * self.scale_log2
        scores = lax.cond(is_masked, lambda s: self.mask(part, block * BLOCK, s), lambda s: s, scores)
        new_top = jnp.maximum(top, scores.max(axis=0))
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [1]))
        weight_ref = scratch["weight_smem"]
        # All warps are through with the weights before: they have met in the reduction.
        weight_ref.transpose((1, 0))[...] = weights.astype(weight_ref.dtype)
        decay = jnp.exp2(top - new_top)
        total = total * lax.broadcast_in_dim(decay, total.shape, [1]) + weights
        sums = tuple(piece * lax.broadcast_in_dim(decay, piece.shape, [1]) for piece in sums)
        plgpu.commit_smem()

        def clean_if_needed(_, carry):
            is_bad = scratch["flag_smem"][0] != 0.0
            return lax.fori_loop(0, jnp.int32(is_bad), lambda _, c: self.clean(part, block * BLOCK, stage, c), carry)

        lax.fori_loop(0, jnp.int32(is_masked), clean_if_needed, jnp.int32(0))
        sums = self.add_products(stage, sums, weight_ref)
        plgpu.barrier_arrive(scratch["k_empty"].at[stage])
        return next_stage(self.layout, stage), sums, new_top, total

    def scores(self, stage, zero):
        """[positions, rows]: the keys of a stage times the queries, piece by piece as they come."""

        def scope(acc_ref):
            for piece in range(self.q_pieces):
                of_piece, column = divmod(piece, self.q_pieces // self.pieces)
                if column == 0:
                    plgpu.barrier_wait(self.scratch["k_full"].at[stage * self.pieces + of_piece])
                plgpu.wgmma(acc_ref, self.keys(stage, piece), self.queries(zero + piece).transpose((1, 0)))
            return acc_ref[...]

        return pl.run_scoped(scope, plgpu.ACC((BLOCK, self.columns), jnp.float32))

    def mask(self, part: Part, first: jax.Array, scores):
        """The scores, far below `MASKED` where a row does not attend a position; notes whether all keys are finite.

        A key that is not finite makes every row's score so, that of the first row for certain a query's.
        """
        self.scratch["flag_smem"][...] = (scores - scores).sum(axis=0)  # 0, or NaN
        is_visible = visible_columns(self.layout, self.gmem.bits, part, first, BLOCK, self.columns)
        return jnp.where(is_visible, scores, 2 * MASKED)

    def add_products(self, stage, sums, weight_ref):
        """Each piece of the sums + its values @ weights, the sums staying where they are."""
        values = [self.keys(stage, piece).transpose((1, 0)) for piece in range(self.v_pieces)]
        if self.is_interpreted:  # the interpreter has no accumulators that start from a value
            weights = weight_ref.transpose((1, 0))[...]
            return tuple(
                piece + jnp.dot(value[...], weights, preferred_element_type=jnp.float32)
                for piece, value in zip(sums, values, strict=True)
            )
        weights = weight_ref.transpose((1, 0))

        def add(acc_refs):
            for acc_ref, value in zip(acc_refs, values, strict=True):
                plgpu.wgmma(acc_ref, value, weights)

        return pl.run_state(add)(tuple(plgpu.ACC.init(piece) for piece in sums))

    def clean(self, part: Part, first: jax.Array, stage, carry):
        """Zeroes values that nobody attends and values that are not finite: 0 * NaN would carry them to every row.

        An attended one that is not finite shows in the scores already, since the values are the keys.
        """
        is_attended = attended(self.layout, part, first, (BLOCK, COLUMNS), plgpu.Layout.WGMMA)

        def clean_piece(piece, carry):
            for column in range(0, self.layout.k_channels // self.pieces, COLUMNS):
                value_ref = self.scratch["k_smem"].at[stage * self.pieces + piece, :, pl.ds(column, COLUMNS)]
                value = plgpu.load(value_ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
                is_finite = value - value == 0.0
                value = jnp.where(is_attended, jnp.where(is_finite, value, 0.0), 0.0)
                value_ref[...] = value.astype(value_ref.dtype)
            return carry

        lax.fori_loop(0, self.pieces, clean_piece, jnp.int32(0))
        plgpu.commit_smem()
        return carry

    def finish(self, part: Part, sums, top, total) -> None:
        """Writes the part: to the output if it is a whole item, else beside it, for the combine."""
        gmem, layout = self.gmem, self.layout
        total = total.sum(axis=0)
        is_empty = total == 0.0
        total = jnp.where(is_empty, 1.0, total)
        factor = 1.0 / total
        sums = [piece * lax.broadcast_in_dim(factor, piece.shape, [1]) for piece in sums]
        is_whole = part.first_cta == part.last_cta

        @pl.when(is_whole)
        def _():
            for piece, value in enumerate(sums):
                place = self.queries(piece)
                place.transpose((1, 0))[...] = value.astype(place.dtype)
            plgpu.commit_smem()
            for piece in range(self.v_pieces):
                plgpu.copy_smem_to_gmem(
                    self.queries(piece).at[pl.ds(0, layout.tile_rows)],
                    gmem.out.at[item_rows(part.item, layout.tile_rows), pl.ds(piece * COLUMNS, COLUMNS)],
                )
            plgpu.wait_smem_to_gmem(0)

        @pl.when(jnp.logical_not(is_whole))
        def _():
            which = 2 * self.cta + jnp.where(self.cta == part.first_cta, 1, 0)
            for piece, value in enumerate(sums):
                first = which * layout.v_channels + piece * COLUMNS
                gmem.parts.at[pl.ds(pl.multiple_of(first, COLUMNS), COLUMNS)][...] = value
            lse = jnp.where(is_empty, MASKED, top + jnp.log2(total))
            gmem.lse.at[pl.ds(pl.multiple_of(which * self.columns, self.columns), self.columns)][...] = lse

        note_cut(gmem, part, self.cta)
