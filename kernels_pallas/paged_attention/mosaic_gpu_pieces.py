"""How the kernel for wide latent values cuts a block of keys, and what its producer copies for one."""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.paged_attention.mosaic_gpu_common import COLUMNS, Refs, page_piece
from kernels_pallas.paged_attention.mosaic_gpu_schedule import Layout

NUM_HALVES = 2  # of the value channels: a warpgroup each
NUM_STAGES = 2
SUB_BLOCK = 64  # positions of a stage: a block of the work list has one for each half


class Pieces:
    """How the channels of a block are cut: value pieces, those of the first half first, and the tail behind them."""

    def __init__(self, layout: Layout):
        half = layout.v_channels // NUM_HALVES
        self.channels = 2 * COLUMNS if half % (2 * COLUMNS) == 0 else COLUMNS
        self.num = layout.v_channels // self.channels
        self.per_half = self.num // NUM_HALVES
        self.tail = layout.k_channels - layout.v_channels
        self.tail_channels = max(self.tail, SUB_BLOCK)  # the weights take its place, also where keys are values only
        self.num_all = self.num + 1
        self.order = (self.num, *range(self.num))  # the tail is free first

    def barrier(self, stage: int | jax.Array, piece: int) -> int | jax.Array:
        """Which barrier belongs to the piece; the tail is piece `num`."""
        return stage * self.num_all + piece

    def of_half(self, half: int) -> range:
        """The value pieces that one half of the sums needs."""
        return range(half * self.per_half, (half + 1) * self.per_half)

    def span(self, piece: int) -> tuple[int, int]:
        """(first channel, channels); the tail may have none."""
        return piece * self.channels, self.tail if piece == self.num else self.channels

    def smem(self, scratch: dict, stage: int | jax.Array, piece: int):
        """[positions, channels] of a piece."""
        if piece == self.num:
            return scratch["tail_smem"].at[stage, :, pl.ds(0, self.tail)]
        return scratch["k_smem"].at[stage * self.num + piece]

    def copies(self, gmem: Refs, scratch: dict):
        """What the producer does for a block, given where its rows lie."""

        def copy(starts: tuple[jax.Array, ...], kv_head: jax.Array, carry: jax.Array) -> jax.Array:  # noqa: ARG001
            for stage in range(NUM_STAGES):
                if len(starts) == 1:  # pages of a whole block
                    mine = (starts[0] + stage * SUB_BLOCK,)
                else:
                    mine = starts[stage * len(starts) // NUM_STAGES :][: len(starts) // NUM_STAGES]
                self.copy_stage(gmem, scratch, stage, mine)
            return carry

        return copy

    def copy_stage(self, gmem: Refs, scratch: dict, stage: int, starts: tuple[jax.Array, ...]) -> None:
        """Starts the copies of a stage, each piece as soon as its place is free."""
        rows = SUB_BLOCK // len(starts)
        for piece in self.order:
            barrier = self.barrier(stage, piece)
            first, channels = self.span(piece)
            plgpu.barrier_wait(scratch["k_empty"].at[barrier])
            if not channels:
                continue
            for index, start in enumerate(starts):
                if piece == self.num:
                    place = scratch["tail_smem"].at[stage, pl.ds(index * rows, rows)]
                else:
                    place = scratch["k_smem"].at[stage * self.num + piece, pl.ds(index * rows, rows)]
                plgpu.copy_gmem_to_smem(
                    gmem.k.at[page_piece(start, rows), pl.ds(first, channels)],
                    place,
                    scratch["k_full"].at[barrier],
                )
