"""The body of the TPU kernel: double-buffered copies of pages into VMEM, and softmax kept online over the blocks.

The grid is (slot, row tile) and runs in order, so a block's copy can be started while the block before it is attended,
across the border of a slot too: the first block of the next live slot travels while the last one of this slot is used.

Blocks that every row of the tile attends whole take the short path: no mask, nothing cleaned. What is left, the block
or two around the rows' own positions, takes the long one.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.paged_attention.mosaic_tpu_layout import VMEM_BYTES, Layout

_MASKED = -1e30  # finite: a row that has attended nothing yet must not compute inf - inf
_LARGEST = float(jnp.finfo(jnp.float32).max)
_BITS = 32


@dataclass(frozen=True)
class Step:
    """One (slot, row tile) of the grid, in scalars of the kernel."""

    slot: Any
    tile: Any


@dataclass(frozen=True)
class Kernel:
    """One grid step of the kernel: the references of `pallas_call`, and what is done with them."""

    layout: Layout
    table_ref: Any  # SMEM int32 [B * P]
    len_ref: Any  # SMEM int32 [B]
    bits_ref: Any  # SMEM int32 [B * W] or None
    q_ref: Any  # VMEM [1, 1, G, M, C]
    k_hbm: Any  # HBM [N, Z * G, C]
    v_hbm: Any  # HBM [N, Z * G, E] or None
    out_ref: Any  # VMEM [1, 1, G, M, E]
    k_buffers: Any  # VMEM [2, S * G, C]
    v_buffers: Any  # VMEM [2, S * G, E] or None
    k_sems: Any  # one DMA semaphore a buffer
    v_sems: Any
    top_ref: Any  # VMEM float32 [G, M, 1]: largest score of a row so far
    total_ref: Any  # VMEM float32 [G, M, 1]: sum of its weights
    sums_ref: Any  # VMEM float32 [G, M, E]: sum of its weighted values
    buffer_ref: Any  # SMEM int32 [1]: the buffer of the block that is attended next

    def run(self) -> None:
        """The whole grid step."""
        step = Step(pl.program_id(0), pl.program_id(1))
        num_blocks = self.num_blocks(step)

        @pl.when((step.slot == 0) & (step.tile == 0))
        def _():
            self.buffer_ref[0] = 0
            self.start_if_any(Step(self.live_slot_from(0), 0), 0, 0)

        @pl.when(num_blocks == 0)
        def _():
            self.out_ref[...] = jnp.zeros_like(self.out_ref)

        @pl.when(num_blocks > 0)
        def _():
            self.top_ref[...] = jnp.full_like(self.top_ref, _MASKED)
            self.total_ref[...] = jnp.zeros_like(self.total_ref)
            self.sums_ref[...] = jnp.zeros_like(self.sums_ref)
            lax.fori_loop(0, num_blocks, lambda block, _: self.block_step(step, block, num_blocks), None)
            # A padding row of a tile may have attended nothing.
            total = self.total_ref[...]
            out = self.sums_ref[...] / jnp.where(total == 0.0, 1.0, total)
            self.out_ref[0, 0] = out.astype(self.out_ref.dtype)

    def block_step(self, step: Step, block: Any, num_blocks: Any) -> None:
        """Starts the copy of the block after this one, waits for this one's, attends it."""
        buffer = self.buffer_ref[0]
        is_last = block + 1 == num_blocks

        @pl.when(~is_last)
        def _():
            self.start(step, block + 1, 1 - buffer)

        @pl.when(is_last)
        def _():
            self.start_if_any(self.step_after(step), 0, 1 - buffer)

        self.wait(step, block, buffer)
        is_whole = (block + 1) * self.layout.block <= self.whole_until(step)

        @pl.when(is_whole)
        def _():
            self.attend(step, block, buffer, is_masked=False)

        @pl.when(~is_whole)
        def _():
            self.attend(step, block, buffer, is_masked=True)

        self.buffer_ref[0] = 1 - buffer

    # --- which positions

    def base(self, slot: Any) -> Any:
        """The slot's committed length; one past the table attends all of it, and sums of lengths cannot wrap around."""
        return jnp.minimum(self.len_ref[slot], self.layout.num_positions)

    def end(self, step: Step) -> Any:
        """Positions that some row of the tile may attend: those before this one."""
        layout = self.layout
        base = self.base(step.slot)
        rows = jnp.minimum((step.tile + 1) * layout.tile_rows, layout.num_rows)
        return jnp.where(base < 0, 0, jnp.minimum(base + rows, layout.num_positions))

    def whole_until(self, step: Step) -> Any:
        """Positions before this one are attended by every row of the tile."""
        first_row = 0 if self.layout.has_bits else step.tile * self.layout.tile_rows + 1
        return jnp.minimum(self.base(step.slot) + first_row, self.layout.num_positions)

    def num_blocks(self, step: Step) -> Any:
        return pl.cdiv(self.end(step), self.layout.block)

    def live_slot_from(self, slot: Any) -> Any:
        """The first live slot from this one on, or B."""
        last = self.layout.num_slots - 1
        return lax.while_loop(
            lambda at: (at <= last) & (self.len_ref[jnp.minimum(at, last)] < 0), lambda at: at + 1, jnp.int32(slot)
        )

    def step_after(self, step: Step) -> Step:
        """The grid step that attends something next; past the last one its slot is B."""
        if self.layout.num_tiles == 1:
            return Step(self.live_slot_from(step.slot + 1), 0)
        is_last_tile = step.tile + 1 == self.layout.num_tiles
        slot = lax.cond(is_last_tile, lambda: self.live_slot_from(step.slot + 1), lambda: step.slot)
        return Step(slot, jnp.where(is_last_tile, 0, step.tile + 1))

    # --- copies

    def start_if_any(self, step: Step, block: Any, buffer: Any) -> None:
        @pl.when(step.slot < self.layout.num_slots)
        def _():
            self.start(step, block, buffer)

    def start(self, step: Step, block: Any, buffer: Any) -> None:
        """Starts the copies of a block's pages; a page id that does not exist means the null page."""

        def start_page(index: Any, _: None) -> None:
            page = self.table_ref[step.slot * self.layout.pages_per_slot + block * self.layout.block_pages + index]
            is_page = (page >= 0) & (page < self.layout.num_pages)
            for copy in self.copies(jnp.where(is_page, page, 0), index, buffer):
                copy.start()

        lax.fori_loop(0, self.num_pages_of(step, block), start_page, None)

    def wait(self, step: Step, block: Any, buffer: Any) -> None:
        """Waits for all of a block's copies. Which page a copy came from does not matter to a wait, only its size."""

        def wait_page(index: Any, _: None) -> None:
            for copy in self.copies(0, index, buffer):
                copy.wait()

        lax.fori_loop(0, self.num_pages_of(step, block), wait_page, None)

    def num_pages_of(self, step: Step, block: Any) -> Any:
        left = self.end(step) - block * self.layout.block
        return jnp.minimum(pl.cdiv(left, self.layout.page_size), self.layout.block_pages)

    def copies(self, page: Any, index: Any, buffer: Any) -> list[Any]:
        """The copies that bring a page to its place in a buffer."""
        size = self.layout.page_size * self.layout.num_kv_heads
        place = pl.ds(pl.multiple_of(index * size, size), size)
        copies = [pltpu.make_async_copy(self.k_hbm.at[page], self.k_buffers.at[buffer, place], self.k_sems.at[buffer])]
        if self.v_hbm is not None:
            v_buffer = self.v_buffers.at[buffer, place]
            copies.append(pltpu.make_async_copy(self.v_hbm.at[page], v_buffer, self.v_sems.at[buffer]))
        return copies

    # --- arithmetic

    def attend(self, step: Step, block: Any, buffer: Any, *, is_masked: bool) -> None:
        """Adds a block to the rows' sums, all heads together: the scores of few rows fill no register alone."""
        keys_G = self.heads(self.k_buffers, buffer)
        if self.layout.is_latent:
            values_G = [k_SC[:, : self.layout.v_channels] for k_SC in keys_G]
        else:
            values_G = self.heads(self.v_buffers, buffer)

        scores_GMS = jnp.stack([self.scores(self.q_ref[0, 0, head], k_SC) for head, k_SC in enumerate(keys_G)])
        attended_MS = self.attended(step, block) if is_masked else None
        if attended_MS is not None:
            scores_GMS = jnp.where(attended_MS[None], scores_GMS, _MASKED)
        old_top = self.top_ref[...]
        top = jnp.maximum(old_top, jnp.max(scores_GMS, axis=2, keepdims=True))
        decay = self.decay(old_top, top)
        weights_GMS = jnp.exp(scores_GMS - top)
        if attended_MS is not None:
            # A weight of zero does not stop NaN or inf. Values that are not finite leave the product, and the weights
            # of the rows that do attend them become NaN instead.
            is_bad_GMS = jnp.stack([attended_MS & self.bad_positions(v_SE) for v_SE in values_G])
            weights_GMS = jnp.where(attended_MS[None], weights_GMS, 0.0)
            weights_GMS = jnp.where(is_bad_GMS, jnp.nan, weights_GMS)
            values_G = [jnp.where(self.is_finite(v_SE), v_SE, jnp.zeros_like(v_SE)) for v_SE in values_G]
        self.top_ref[...] = top
        self.total_ref[...] = self.total_ref[...] * decay + jnp.sum(weights_GMS, axis=2, keepdims=True)
        for head, v_SE in enumerate(values_G):
            weights_MS = weights_GMS[head].astype(v_SE.dtype)
            sums_ME = jnp.dot(weights_MS, v_SE, precision=self.layout.precision, preferred_element_type=jnp.float32)
            self.sums_ref[head] = self.sums_ref[head] * decay[head] + sums_ME

    def scores(self, q_MC: jax.Array, k_SC: jax.Array) -> jax.Array:
        products_MS = lax.dot_general(
            q_MC,
            k_SC,
            (((1,), (1,)), ((), ())),
            precision=self.layout.precision,
            preferred_element_type=jnp.float32,
        )
        return products_MS * self.layout.scale

    def attended(self, step: Step, block: Any) -> jax.Array:
        """[M, S]: which rows of the tile attend which positions of the block."""
        layout = self.layout
        shape = (layout.packed_rows, layout.block)
        position_MS = block * layout.block + lax.broadcasted_iota(jnp.int32, shape, 1)
        ahead_MS = position_MS - self.base(step.slot)  # 0 at the first row's own position
        row_MS = lax.div(lax.broadcasted_iota(jnp.int32, shape, 0), jnp.int32(layout.group))
        if self.bits_ref is None:
            is_attended = ahead_MS <= row_MS + step.tile * layout.tile_rows
        else:
            bits_MS = jnp.zeros(shape, jnp.int32)
            for row in range(layout.num_rows):
                bits_MS = jnp.where(row_MS == row, self.bits_ref[step.slot * layout.num_rows + row], bits_MS)
            bit_MS = lax.shift_right_logical(bits_MS, jnp.clip(ahead_MS, 0, _BITS - 1)) & 1
            is_attended = (ahead_MS < 0) | ((ahead_MS < _BITS) & (bit_MS == 1))
        return is_attended & (position_MS < layout.num_positions)

    def bad_positions(self, v_SE: jax.Array) -> jax.Array:
        """[1, S]: where some channel is not finite. A product lays the positions along lanes, as weights do."""
        bad_SE = jnp.where(self.is_finite(v_SE), 0.0, 1.0).astype(jnp.bfloat16)
        ones_8E = jnp.ones((8, v_SE.shape[1]), jnp.bfloat16)
        count_8S = lax.dot_general(ones_8E, bad_SE, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return count_8S[:1] > 0.0

    @staticmethod
    def decay(old_top: jax.Array, top: jax.Array) -> jax.Array:
        """What sums of weights `exp(score - old_top)` are multiplied by to be sums of `exp(score - top)`."""
        return jnp.exp(old_top - top)

    @staticmethod
    def is_finite(x: jax.Array) -> jax.Array:
        return jnp.abs(x.astype(jnp.float32)) <= _LARGEST

    def heads(self, buffers: Any, buffer: Any) -> list[jax.Array]:
        """A block's keys or values of each head, [S, channels].

        Heads alternate along the sublanes. Two heads in bf16 share a 32-bit word, the first in its low half, so a
        strided load of words brings a pair; a bf16 number is the upper half of a float32 one.
        """
        num_heads, length = self.layout.num_kv_heads, self.layout.block
        if num_heads == 1:
            return [buffers[buffer]]
        if self.layout.dtype == "float32":
            return [buffers[buffer, pl.ds(head, length, stride=num_heads), :] for head in range(num_heads)]
        words = buffers.bitcast(jnp.uint32)
        heads = []
        for pair in range(num_heads // 2):
            pair_SC = words[buffer, pl.ds(pair, length, stride=num_heads // 2), :]
            for half in (pair_SC << 16, pair_SC & jnp.uint32(0xFFFF0000)):
                heads.append(pltpu.bitcast(half, jnp.float32).astype(jnp.bfloat16))
        return heads


def attend(
    layout: Layout, scalars: list[jax.Array], q: jax.Array, pools: list[jax.Array], out_dtype: Any, interpret: Any
) -> jax.Array:
    """[B, tiles, G, M, E]: the kernel over packed queries [B, tiles, G, M, C] and pools as matrices [N, Z * G, C].

    `scalars` are the page tables, the lengths, and the ancestor bits if there are any, flat.
    """
    heads, rows = layout.num_kv_heads, layout.packed_rows

    def tile_of(channels: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, heads, rows, channels), lambda slot, tile, *_: (slot, tile, 0, 0, 0))

    return pl.pallas_call(
        functools.partial(_run, layout),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(layout.num_slots, layout.num_tiles),
            in_specs=[tile_of(layout.k_channels), *[pl.BlockSpec(memory_space=pl.ANY) for _ in pools]],
            out_specs=tile_of(layout.v_channels),
            scratch_shapes=[
                *[pltpu.VMEM((2, layout.block * heads, pool.shape[2]), pool.dtype) for pool in pools],
                *[pltpu.SemaphoreType.DMA((2,)) for _ in pools],
                pltpu.VMEM((heads, rows, 1), jnp.float32),
                pltpu.VMEM((heads, rows, 1), jnp.float32),
                pltpu.VMEM((heads, rows, layout.v_channels), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((layout.num_slots, layout.num_tiles, heads, rows, layout.v_channels), out_dtype),
        # In order: a grid step starts copies for the next one.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=layout.flops, bytes_accessed=layout.bytes_accessed, transcendentals=layout.num_scores
        ),
        name="paged_attention_tpu",
        interpret=interpret,
    )(*scalars, q, *pools)


def _run(layout: Layout, *refs: Any) -> None:
    """The function that `pallas_call` wants: its references come in one row, and some of them not always."""
    left = iter(refs)
    table, lens = next(left), next(left)
    bits = next(left) if layout.has_bits else None
    q, k_hbm = next(left), next(left)
    v_hbm = None if layout.is_latent else next(left)
    out, k_buffers = next(left), next(left)
    v_buffers = None if layout.is_latent else next(left)
    k_sems = next(left)
    v_sems = None if layout.is_latent else next(left)
    top, total, sums, buffer = left
    Kernel(
        layout=layout,
        table_ref=table,
        len_ref=lens,
        bits_ref=bits,
        q_ref=q,
        k_hbm=k_hbm,
        v_hbm=v_hbm,
        out_ref=out,
        k_buffers=k_buffers,
        v_buffers=v_buffers,
        k_sems=k_sems,
        v_sems=v_sems,
        top_ref=top,
        total_ref=total,
        sums_ref=sums,
        buffer_ref=buffer,
    ).run()
