"""The Hopper attention kernel for up to 256 value channels: one producer warpgroup streams pages, one consumer attends.

The grid is persistent, one CTA a multiprocessor; its share of the work list comes from `mosaic_gpu_schedule`. The
producer follows the page table and keeps `num_stages` blocks of keys and values in flight through TMA, across the
borders of items, so the memory pipe never drains. The consumer holds a 64-row tile: scores by wgmma, online softmax
in float32, values by wgmma.

An item that one CTA holds whole is written straight to the output. The parts of a cut item are normalised and written
in float32, with the base-2 logarithm of their softmax sums; `mosaic_gpu_combine` merges them.
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
    part_rows,
    part_types,
    produce_whole_blocks,
    refs_from,
    unmasked_end,
    visible,
)
from kernels_pallas.paged_attention.mosaic_gpu_schedule import TILE, Layout, Part, Share, for_each_part, own_share

_SWIZZLE = 128
_CONSUMER, _PRODUCER = 0, 1


def attend(
    layout: Layout,
    scale: float,
    lens_B: jax.Array,
    table: jax.Array,
    bits: jax.Array | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    out_ref: jax.Ref,
    *,
    interpret: object = None,
) -> tuple[jax.Array, ...]:
    """Fills `out_ref` with the items that one CTA holds whole; returns the parts of the others, as in `Refs`."""
    pages_per_block = max(1, layout.block // layout.page_size)

    def body(*refs, **scratch):
        gmem = refs_from(refs, has_bits=bits is not None, is_latent=v is None)
        if interpret is None:
            plgpu.griddepcontrol_launch_dependents()  # the combine may come as soon as there is room
        share = own_share(layout, gmem.lens, lax.axis_index("cta"))
        warpgroup = lax.axis_index("wg")

        @pl.when(warpgroup == _CONSUMER)
        def _():
            _Consumer(layout, scale, gmem, scratch, interpret is not None).run(share)

        @pl.when(warpgroup == _PRODUCER)
        def _():
            produce_whole_blocks(layout, gmem, share, scratch)

    body.__name__ = "paged_attention_mosaic_gpu"
    transforms = (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(_SWIZZLE))
    stages = layout.num_stages
    q_pieces = max(layout.k_channels, layout.v_channels) // COLUMNS
    scratch_types = {
        "q_smem": plgpu.SMEM((q_pieces, TILE, COLUMNS), q.dtype, transforms=transforms),
        "k_smem": plgpu.SMEM((stages, layout.block, layout.k_channels), k.dtype, transforms=transforms),
        "q_full": plgpu.Barrier(num_arrivals=layout.k_channels // COLUMNS),
        "k_full": plgpu.Barrier(num_arrivals=pages_per_block, num_barriers=stages),
        "k_empty": plgpu.Barrier(num_barriers=stages),
    }
    if v is not None:
        scratch_types |= {
            "v_smem": plgpu.SMEM((stages, layout.block, layout.v_channels), v.dtype, transforms=transforms),
            "bad_smem": plgpu.SMEM((layout.block,), jnp.float32),
            "v_full": plgpu.Barrier(num_arrivals=pages_per_block, num_barriers=stages),
            "v_empty": plgpu.Barrier(num_barriers=stages),
        }
    kernel = plgpu.kernel(
        body,
        out_type=part_types(layout),
        scratch_types=scratch_types,
        grid=(layout.num_ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="wg",
        # Lane semantics: layouts are what this file says they are; inferring them can take minutes.
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    operands = [lens_B, table, *([] if bits is None else [bits]), q, k, *([] if v is None else [v]), out_ref]
    return kernel(*operands)


class _Consumer:
    """The consumer warpgroup."""

    def __init__(self, layout: Layout, scale: float, gmem: Refs, scratch: dict, is_interpreted: bool):
        self.layout, self.gmem, self.scratch, self.is_interpreted = layout, gmem, scratch, is_interpreted
        self.scale_log2 = scale * math.log2(math.e)
        self.cta = lax.axis_index("cta")

    def run(self, share: Share) -> None:
        self.gmem.cuts[2 * self.cta] = jnp.int32(-1)
        for stage in range(self.layout.num_stages):
            plgpu.barrier_arrive(self.scratch["k_empty"].at[stage])
            if not self.layout.is_latent:
                plgpu.barrier_arrive(self.scratch["v_empty"].at[stage])
        for_each_part(self.layout, self.gmem.lens, share, self.attend_part, jnp.int32(0))

    def attend_part(self, part: Part, stage: jax.Array) -> jax.Array:
        layout = self.layout
        for piece in range(layout.k_channels // COLUMNS):
            plgpu.copy_gmem_to_smem(
                self.gmem.q.at[item_rows(part.item, layout.tile_rows), pl.ds(piece * COLUMNS, COLUMNS)],
                self.scratch["q_smem"].at[piece, pl.ds(0, layout.tile_rows)],
                self.scratch["q_full"],
            )
        plgpu.barrier_wait(self.scratch["q_full"])

        unmasked = unmasked_end(layout, part)
        per_row = plgpu.Layout.WGMMA.reduce(1)
        carry = (
            stage,
            plgpu.layout_cast(jnp.zeros((TILE, layout.v_channels), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((TILE,), MASKED, jnp.float32), per_row),
            plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), per_row),
        )
        carry = lax.fori_loop(part.first, unmasked, lambda j, c: self.attend_block(part, j, c, is_masked=False), carry)
        carry = lax.fori_loop(unmasked, part.last, lambda j, c: self.attend_block(part, j, c, is_masked=True), carry)
        stage, out, top, total = carry
        self.store(part, out, top, total)
        return stage

    def attend_block(self, part: Part, block: jax.Array, carry, *, is_masked: bool):
        layout = self.layout
        stage, out, top, total = carry
        q_smem, k_smem = self.scratch["q_smem"], self.scratch["k_smem"]
        # 0, but not to the compiler: it would keep all query pieces' addresses over the loop, and spill the sums.
        zero = jnp.minimum(stage, 0)
        plgpu.barrier_wait(self.scratch["k_full"].at[stage])

        def score(acc_ref):
            for piece in range(layout.k_channels // COLUMNS):
                keys = k_smem.at[stage, :, pl.ds(piece * COLUMNS, COLUMNS)]
                plgpu.wgmma(acc_ref, q_smem.at[piece + zero], keys.transpose((1, 0)))
            return acc_ref[...]

        scores = pl.run_scoped(score, plgpu.ACC((TILE, layout.block), jnp.float32)) * self.scale_log2
        if not layout.is_latent:
            plgpu.barrier_arrive(self.scratch["k_empty"].at[stage])
            plgpu.barrier_wait(self.scratch["v_full"].at[stage])
            values = self.scratch["v_smem"].at[stage]
        else:
            values = self.scratch["k_smem"].at[stage, :, pl.ds(0, layout.v_channels)]

        if is_masked:
            is_visible = visible(layout, self.gmem.bits, part, block * layout.block, layout.block)
            is_bad = self.clean_values(part, block, values)
            scores = jnp.where(is_visible, scores, MASKED)
            if is_bad is not None:
                scores = jnp.where(is_visible & is_bad, jnp.nan, scores)
        new_top = jnp.maximum(top, scores.max(axis=1))
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
        if is_masked:
            weights = jnp.where(is_visible, weights, 0.0)
        decay = jnp.exp2(top - new_top)
        total = total * decay + weights.sum(axis=1)
        out = out * lax.broadcast_in_dim(decay, out.shape, [0])
        out = self.add_product(out, weights.astype(self.scratch["q_smem"].dtype), values)
        plgpu.barrier_arrive(self.scratch["k_empty" if layout.is_latent else "v_empty"].at[stage])
        return next_stage(layout, stage), out, new_top, total

    def add_product(self, out, weights, values):
        """out + weights @ values, the sums staying where they are."""
        if self.is_interpreted:  # the interpreter has neither accumulators that start from a value nor A in registers
            return out + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
        return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, weights, values))(plgpu.ACC.init(out))

    def clean_values(self, part: Part, block: jax.Array, values):
        """Zeroes, in shared memory, values that nobody attends and values that are not finite.

        0 * NaN would carry either to every row. Returns where an attended value was not finite, as [rows, positions],
        for the caller to give NaN to the rows that attend it; None for latent values, where the scores show it already.
        """
        layout = self.layout
        is_attended = attended(layout, part, block * layout.block, (layout.block, COLUMNS), plgpu.Layout.WGMMA)
        flag = None
        for column in range(0, layout.v_channels, COLUMNS):
            piece = values.at[:, pl.ds(column, COLUMNS)]
            value = plgpu.load(piece, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
            is_bad = value - value != 0.0  # true of NaN and of infinities
            piece[...] = jnp.where(is_attended, jnp.where(is_bad, 0.0, value), 0.0).astype(piece.dtype)
            if not layout.is_latent:
                found = jnp.where(is_attended & is_bad, 1.0, 0.0).max(axis=1)
                flag = found if flag is None else jnp.maximum(flag, found)
        if not layout.is_latent:
            self.scratch["bad_smem"][...] = flag
        plgpu.commit_smem()
        if layout.is_latent:
            return None
        flag = plgpu.load(self.scratch["bad_smem"], layout=plgpu.Layout.WGMMA.reduce(0))
        return lax.broadcast_in_dim(flag, (TILE, layout.block), [1]) > 0.5

    def store(self, part: Part, out, top, total) -> None:
        """Writes the part: to the output if it is a whole item, else beside it, for the combine."""
        gmem = self.gmem
        is_empty = total == 0.0
        out = out * lax.broadcast_in_dim(1.0 / jnp.where(is_empty, 1.0, total), out.shape, [0])
        is_whole = part.first_cta == part.last_cta

        @pl.when(is_whole)
        def _():
            self.send(out.astype(self.scratch["q_smem"].dtype), part.item)

        @pl.when(jnp.logical_not(is_whole))
        def _():
            rows = part_rows(part, self.cta)
            gmem.parts.at[rows][...] = out
            gmem.lse.at[rows][...] = jnp.where(is_empty, MASKED, top + jnp.log2(jnp.where(is_empty, 1.0, total)))

        note_cut(gmem, part, self.cta)

    def send(self, tile, item: jax.Array) -> None:
        """To the output through the query tile's buffer: of the 64 rows only the item's own are sent."""
        q_smem, rows = self.scratch["q_smem"], self.layout.tile_rows
        pieces = range(self.layout.v_channels // COLUMNS)
        for piece in pieces:
            q_smem[piece] = tile[:, piece * COLUMNS : (piece + 1) * COLUMNS]
        plgpu.commit_smem()
        for piece in pieces:
            plgpu.copy_smem_to_gmem(
                q_smem.at[piece, pl.ds(0, rows)],
                self.gmem.out.at[item_rows(item, rows), pl.ds(piece * COLUMNS, COLUMNS)],
            )
        plgpu.wait_smem_to_gmem(0)
