"""The Hopper attention kernel: one producer warpgroup streams pages, one or two consumer warpgroups attend.

The grid is persistent, one CTA a multiprocessor; its share of the work list comes from `mosaic_gpu_schedule`. The
producer follows the page table and keeps `num_stages` blocks of keys and values in flight through TMA, across the
borders of items, so the memory pipe never drains. Each consumer holds a 64-row tile: scores by wgmma, online softmax
in float32, values by wgmma. Values of more than 256 channels are split over two consumers, which both compute the
scores: 64 x 512 float32 sums do not fit into one warpgroup's registers.

An item that one CTA holds whole is written straight to the output. The parts of a cut item are normalised and written
as pairs of bf16 (value and remainder: 16 bits of mantissa, because they leave through the query tile's buffer), with
the base-2 logarithm of their softmax sums; `mosaic_gpu_combine` merges them.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.paged_attention.mosaic_gpu_schedule import TILE, Layout, Part, for_each_part

_SWIZZLE = 128
_COLUMNS = 64  # bf16 channels in one swizzled line
MAX_V_PER_CONSUMER = 256
_MASKED = -1e30  # finite: a row that has seen nothing yet must not compute inf - inf


@dataclass(frozen=True)
class Refs:
    """The kernel's operands in device memory, matrices where TMA wants them."""

    lens: object  # [B]
    table: object  # [B * P]
    bits: object | None  # [B * W]
    q: object  # [items * tile_rows, C]
    k: object  # [N * Z, G * C]
    v: object | None  # [N * Z, G * E]
    out: object  # [items * tile_rows, E]
    high: object  # [2 * CTAs * tile_rows, E]: parts
    low: object
    lse: object  # [2 * CTAs * TILE]
    holders: object  # [2 * items]: first and last CTA of each item


def num_consumers(v_channels: int) -> int:
    """Warpgroups that share the value channels."""
    return -(-v_channels // MAX_V_PER_CONSUMER)


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
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Fills `out_ref` with the items that one CTA holds whole; returns the parts of the others.

    Returns (high, low, log2 of softmax sums, holding CTAs), laid out as in `Refs`.
    """
    consumers = num_consumers(layout.v_channels)
    pages_per_block = max(1, layout.block // layout.page_size)

    def body(*refs, **scratch):
        it = iter(refs)
        lens, table = next(it), next(it)
        bits_ref = None if bits is None else next(it)
        q_ref, k_ref = next(it), next(it)
        v_ref = None if v is None else next(it)
        gmem = Refs(lens, table, bits_ref, q_ref, k_ref, v_ref, *it)
        warpgroup = lax.axis_index("wg")
        for index in range(consumers):

            @pl.when(warpgroup == index)
            def _(index=index):
                if consumers > 1:
                    plgpu.set_max_registers(232, action="increase")
                _Consumer(layout, scale, gmem, scratch, index, consumers, interpret is not None).run()

        @pl.when(warpgroup == consumers)
        def _():
            if consumers > 1:
                plgpu.set_max_registers(40, action="decrease")
            _produce(layout, gmem, scratch)

    transforms = (plgpu.TilingTransform((8, _COLUMNS)), plgpu.SwizzleTransform(_SWIZZLE))
    stages = layout.num_stages
    q_pieces = max(layout.k_channels, layout.v_channels) // _COLUMNS
    scratch_types = {
        "q_smem": plgpu.SMEM((q_pieces, TILE, _COLUMNS), q.dtype, transforms=transforms),
        "k_smem": plgpu.SMEM((stages, layout.block, layout.k_channels), k.dtype, transforms=transforms),
        "lse_smem": plgpu.SMEM((TILE,), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=layout.k_channels // _COLUMNS),
        "k_full": plgpu.Barrier(num_arrivals=pages_per_block, num_barriers=stages),
        "k_empty": plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        "together": plgpu.Barrier(num_arrivals=consumers),
    }
    if v is not None:
        scratch_types |= {
            "v_smem": plgpu.SMEM((stages, layout.block, layout.v_channels), v.dtype, transforms=transforms),
            "bad_smem": plgpu.SMEM((layout.block,), jnp.float32),
            "v_full": plgpu.Barrier(num_arrivals=pages_per_block, num_barriers=stages),
            "v_empty": plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        }
    parts = 2 * layout.num_ctas
    part_type = jax.ShapeDtypeStruct((parts * layout.tile_rows, layout.v_channels), q.dtype)
    kernel = plgpu.kernel(
        _named(body, "paged_attention_mosaic_gpu"),
        out_type=(
            part_type,
            part_type,
            jax.ShapeDtypeStruct((parts * TILE,), jnp.float32),
            jax.ShapeDtypeStruct((2 * layout.num_items,), jnp.int32),
        ),
        scratch_types=scratch_types,
        grid=(layout.num_ctas,),
        grid_names=("cta",),
        num_threads=consumers + 1,
        thread_name="wg",
        # Lane semantics: layouts are what this file says they are; inferring them can take minutes.
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    operands = [lens_B, table, *([] if bits is None else [bits]), q, k, *([] if v is None else [v]), out_ref]
    return kernel(*operands)


def _named(body, name: str):
    body.__name__ = name
    return body


def _produce(layout: Layout, gmem: Refs, scratch: dict) -> None:
    """Streams the blocks of the CTA's parts into shared memory."""
    rows = min(layout.page_size, layout.block)
    pages_per_block = layout.block // rows
    blocks_per_page = max(1, layout.page_size // layout.block)

    def page_rows(slot: jax.Array, block: jax.Array) -> tuple[jax.Array, ...]:
        """The pool row where each page piece of a block starts. An id outside the pool reads the null page."""
        starts = []
        for piece in range(pages_per_block):
            index = lax.div(block, blocks_per_page) * pages_per_block + piece
            page = gmem.table[slot * layout.pages_per_slot + jnp.minimum(index, layout.pages_per_slot - 1)]
            is_valid = (page >= 0) & (page < layout.num_pages) & (index < layout.pages_per_slot)
            page = jnp.where(is_valid, page, 0)
            starts.append(page * layout.page_size + lax.rem(block, blocks_per_page) * layout.block)
        return tuple(starts)

    def copy_block(stage: jax.Array, starts: tuple[jax.Array, ...], kv_head: jax.Array) -> None:
        plgpu.barrier_wait(scratch["k_empty"].at[stage])
        for piece, start in enumerate(starts):
            plgpu.copy_gmem_to_smem(
                gmem.k.at[
                    pl.ds(_aligned(start, rows), rows), _columns(kv_head, layout.k_channels, layout.num_kv_heads)
                ],
                scratch["k_smem"].at[stage, pl.ds(piece * rows, rows)],
                scratch["k_full"].at[stage],
            )
        if layout.is_latent:
            return
        plgpu.barrier_wait(scratch["v_empty"].at[stage])
        for piece, start in enumerate(starts):
            plgpu.copy_gmem_to_smem(
                gmem.v.at[
                    pl.ds(_aligned(start, rows), rows), _columns(kv_head, layout.v_channels, layout.num_kv_heads)
                ],
                scratch["v_smem"].at[stage, pl.ds(piece * rows, rows)],
                scratch["v_full"].at[stage],
            )

    def part_step(part: Part, count: jax.Array) -> jax.Array:
        def step(block, carry):
            stage, starts = carry
            # The next block's page ids are under way while this block waits for its stage.
            following = page_rows(part.slot, jnp.minimum(block + 1, part.last - 1))
            copy_block(stage, starts, part.kv_head)
            return _next_stage(layout, stage), following

        stage, _ = lax.fori_loop(part.first, part.last, step, (count, page_rows(part.slot, part.first)))
        return stage

    for_each_part(layout, gmem.lens, lax.axis_index("cta"), part_step, jnp.int32(0))
    for stage in range(layout.num_stages):  # nobody leaves while a consumer still reads
        plgpu.barrier_wait(scratch["k_empty"].at[stage])
        if not layout.is_latent:
            plgpu.barrier_wait(scratch["v_empty"].at[stage])


def _next_stage(layout: Layout, stage: jax.Array) -> jax.Array:
    return jnp.where(stage == layout.num_stages - 1, 0, stage + 1)


def _aligned(start: jax.Array, multiple: int) -> jax.Array:
    return pl.multiple_of(start, multiple)


def _columns(kv_head: jax.Array, channels: int, num_kv_heads: int):
    if num_kv_heads == 1:
        return pl.ds(0, channels)
    return pl.ds(pl.multiple_of(kv_head * channels, _COLUMNS), channels)


class _Consumer:
    """One consumer warpgroup: owns `channels` of the values, from `first_channel` on."""

    def __init__(self, layout: Layout, scale, gmem: Refs, scratch: dict, index: int, consumers: int, is_interpreted):
        self.layout, self.gmem, self.scratch = layout, gmem, scratch
        self.scale_log2 = scale * math.log2(math.e)
        self.index, self.consumers, self.is_interpreted = index, consumers, is_interpreted
        self.channels = layout.v_channels // consumers
        self.first_channel = index * self.channels
        self.cta = lax.axis_index("cta")

    def run(self) -> None:
        for stage in range(self.layout.num_stages):
            plgpu.barrier_arrive(self.scratch["k_empty"].at[stage])
            if not self.layout.is_latent:
                plgpu.barrier_arrive(self.scratch["v_empty"].at[stage])
        for_each_part(self.layout, self.gmem.lens, self.cta, self.attend_part, jnp.int32(0))

    def meet(self) -> None:
        """Waits for the other consumer."""
        if self.consumers > 1:
            plgpu.barrier_arrive(self.scratch["together"])
            plgpu.barrier_wait(self.scratch["together"])

    def attend_part(self, part: Part, stage: jax.Array) -> jax.Array:
        layout = self.layout
        if self.index == 0:
            for piece in range(layout.k_channels // _COLUMNS):
                plgpu.copy_gmem_to_smem(
                    self.gmem.q.at[self.rows_of(part.item), pl.ds(piece * _COLUMNS, _COLUMNS)],
                    self.scratch["q_smem"].at[piece, pl.ds(0, layout.tile_rows)],
                    self.scratch["q_full"],
                )
        plgpu.barrier_wait(self.scratch["q_full"])

        # Blocks before `unmasked` lie in the committed prefix: every row attends all of them.
        unmasked = jnp.clip(lax.div(part.committed_len, layout.block), part.first, part.last)
        per_row = plgpu.Layout.WGMMA.reduce(1)
        carry = (
            stage,
            plgpu.layout_cast(jnp.zeros((TILE, self.channels), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((TILE,), _MASKED, jnp.float32), per_row),
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
            for piece in range(layout.k_channels // _COLUMNS):
                keys = k_smem.at[stage, :, pl.ds(piece * _COLUMNS, _COLUMNS)]
                plgpu.wgmma(acc_ref, q_smem.at[piece + zero], keys.transpose((1, 0)))
            return acc_ref[...]

        scores = pl.run_scoped(score, plgpu.ACC((TILE, layout.block), jnp.float32)) * self.scale_log2
        if not layout.is_latent:
            plgpu.barrier_arrive(self.scratch["k_empty"].at[stage])
            plgpu.barrier_wait(self.scratch["v_full"].at[stage])
            values = self.scratch["v_smem"].at[stage]
        else:
            values = self.scratch["k_smem"].at[stage, :, pl.ds(self.first_channel, self.channels)]

        if is_masked:
            is_visible = self.visible(part, block)
            self.meet()  # the values are the keys: nobody may still be scoring them
            is_bad = self.clean_values(part, block, values)
            scores = jnp.where(is_visible, scores, _MASKED)
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
        return _next_stage(layout, stage), out, new_top, total

    def add_product(self, out, weights, values):
        """out + weights @ values, the sums staying where they are."""
        if self.is_interpreted:  # the interpreter has neither accumulators that start from a value nor A in registers
            return out + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
        return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, weights, values))(plgpu.ACC.init(out))

    def visible(self, part: Part, block: jax.Array):
        """[rows, positions]: which packed row attends which position of the block."""
        layout = self.layout
        shape = (TILE, layout.block)
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + part.row_tile * layout.tile_rows
        position = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + block * layout.block
        ahead = position - part.committed_len  # 0 for the first row's own position
        if self.gmem.bits is None:
            is_visible = ahead * layout.group <= row  # ahead <= row // group, without the division
        else:
            bits = jnp.zeros(shape, jnp.int32)
            for w in range(layout.num_rows):
                is_row = (row >= w * layout.group) & (row < (w + 1) * layout.group)
                bits = jnp.where(is_row, self.gmem.bits[part.slot * layout.num_rows + w], bits)
            is_ancestor = lax.shift_right_logical(bits, jnp.clip(ahead, 0, 31)) & 1
            is_visible = (ahead < 0) | ((ahead < layout.num_rows) & (is_ancestor == 1))
        return is_visible & (position < layout.num_positions)

    def clean_values(self, part: Part, block: jax.Array, values):
        """Zeroes, in shared memory, values that nobody attends and values that are not finite.

        0 * NaN would carry either to every row. Returns where an attended value was not finite, as [rows, positions],
        for the caller to give NaN to the rows that attend it; None for latent values, where the scores show it already.
        """
        layout = self.layout
        end = jnp.minimum(part.committed_len + layout.num_rows, layout.num_positions)
        shape = (layout.block, _COLUMNS)
        position = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + block * layout.block
        is_attended = position < end
        flag = None
        for column in range(0, self.channels, _COLUMNS):
            piece = values.at[:, pl.ds(column, _COLUMNS)]
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

    def rows_of(self, index: jax.Array):
        return pl.ds(pl.multiple_of(index * self.layout.tile_rows, 8), self.layout.tile_rows)

    def store(self, part: Part, out, top, total) -> None:
        """Writes the part: to the output if it is a whole item, else beside it, for the combine."""
        gmem = self.gmem
        is_empty = total == 0.0
        out = out * lax.broadcast_in_dim(1.0 / jnp.where(is_empty, 1.0, total), out.shape, [0])
        is_whole = part.first_cta == part.last_cta
        self.meet()  # nobody may still be scoring: the query tile's buffer becomes the way out
        high = out.astype(self.scratch["q_smem"].dtype)

        @pl.when(is_whole)
        def _():
            self.send(high, gmem.out, part.item)

        @pl.when(jnp.logical_not(is_whole))
        def _():
            index = 2 * self.cta + jnp.where(self.cta == part.first_cta, 1, 0)
            self.send(high, gmem.high, index)
            self.send((out - high.astype(jnp.float32)).astype(high.dtype), gmem.low, index)
            if self.index == 0:
                lse_smem = self.scratch["lse_smem"]
                lse_smem[...] = jnp.where(is_empty, _MASKED, top + jnp.log2(jnp.where(is_empty, 1.0, total)))
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(lse_smem, gmem.lse.at[pl.ds(pl.multiple_of(index * TILE, TILE), TILE)])
                plgpu.wait_smem_to_gmem(0)

        if self.index == 0:

            @pl.when(self.cta == part.first_cta)
            def _():
                gmem.holders[2 * part.item] = part.first_cta
                gmem.holders[2 * part.item + 1] = part.last_cta

        self.meet()

    def send(self, tile, dst, index: jax.Array) -> None:
        q_smem = self.scratch["q_smem"]
        pieces = range(self.channels // _COLUMNS)
        first_piece = self.first_channel // _COLUMNS
        for piece in pieces:
            q_smem[first_piece + piece] = tile[:, piece * _COLUMNS : (piece + 1) * _COLUMNS]
        plgpu.commit_smem()
        for piece in pieces:
            plgpu.copy_smem_to_gmem(
                q_smem.at[first_piece + piece, pl.ds(0, self.layout.tile_rows)],
                dst.at[self.rows_of(index), pl.ds((first_piece + piece) * _COLUMNS, _COLUMNS)],
            )
        plgpu.wait_smem_to_gmem(0)
