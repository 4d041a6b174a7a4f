"""What the Hopper attention kernels share: their operands, the stream of pages, and which row attends what."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.paged_attention.mosaic_gpu_schedule import TILE, Layout, Part, Share, for_each_part

COLUMNS = 64  # bf16 channels in one line of 128 bytes
MASKED = -1e30  # finite: a row that has seen nothing yet must not compute inf - inf


@dataclass(frozen=True)
class Refs:
    """The kernels' operands in device memory, matrices where TMA wants them."""

    lens: object  # [B]
    table: object  # [B * P]
    bits: object | None  # [B * W]
    q: object  # [items * tile_rows, C]
    k: object  # [N * Z, G * C]
    v: object | None  # [N * Z, G * E]
    out: object  # [items * out_rows, E]
    parts: object  # [2 * CTAs * TILE, E]: float32 rows of items that several CTAs hold
    lse: object  # [2 * CTAs * TILE]: base-2 logarithms of their softmax sums
    cuts: object  # [2 * CTAs]: the cut item that starts in the CTA (-1: none), and the last CTA that holds it


def refs_from(operands, *, has_bits: bool, is_latent: bool) -> Refs:
    """Names a kernel body's references, which come in this order with the absent ones left out."""
    it = iter(operands)
    lens, table = next(it), next(it)
    bits = next(it) if has_bits else None
    q, k = next(it), next(it)
    return Refs(lens, table, bits, q, k, None if is_latent else next(it), *it)


def part_types(layout: Layout) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Types of `Refs.parts`, `lse` and `cuts`."""
    rows = 2 * layout.num_ctas * TILE
    return (
        jax.ShapeDtypeStruct((rows, layout.v_channels), jnp.float32),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
        jax.ShapeDtypeStruct((2 * layout.num_ctas,), jnp.int32),
    )


def part_rows(part: Part, cta: jax.Array):
    """Rows of `Refs.parts` and `lse` that belong to the CTA's part of a cut item: its first or its last."""
    return pl.ds(pl.multiple_of((2 * cta + jnp.where(cta == part.first_cta, 1, 0)) * TILE, TILE), TILE)


def item_rows(index: jax.Array, rows: int):
    """Rows of an item in an array of `rows` rows an item."""
    return pl.ds(pl.multiple_of(index * rows, 8), rows)


def note_cut(gmem: Refs, part: Part, cta: jax.Array) -> None:
    """Tells the combine of a cut item that starts here."""

    @pl.when((cta == part.first_cta) & (part.first_cta < part.last_cta))
    def _():
        gmem.cuts[2 * cta] = part.item
        gmem.cuts[2 * cta + 1] = part.last_cta


def next_stage(layout: Layout, stage: jax.Array) -> jax.Array:
    """The ring's next stage."""
    return jnp.where(stage == layout.num_stages - 1, 0, stage + 1)


def unmasked_end(layout: Layout, part: Part) -> jax.Array:
    """Blocks before this one lie before the tile's first row: every row attends all of them."""
    num_seen = part.committed_len + tile_first_row(layout, part.row_tile)
    return jnp.clip(lax.div(num_seen, layout.block), part.first, part.last)


def tile_first_row(layout: Layout, row_tile: jax.Array) -> jax.Array:
    """The query row w that the tile's first packed row belongs to; 0 for trees, whose rows have no order."""
    if layout.is_tree or layout.num_row_tiles == 1:
        return jnp.int32(0)
    return lax.div(row_tile * layout.tile_rows, layout.group)


def visible(layout: Layout, bits_ref, part: Part, first: jax.Array, num_positions: int):
    """[rows, positions]: which packed row attends which of the positions from `first` on."""
    shape = (TILE, num_positions)
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + part.row_tile * layout.tile_rows
    position = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + first
    return _is_visible(layout, bits_ref, part, row, position)


def visible_columns(layout: Layout, bits_ref, part: Part, first: jax.Array, num_positions: int, num_rows: int):
    """[positions, rows]: the same, turned round; for an item that is one row tile."""
    shape = (num_positions, num_rows)
    row = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    position = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + first
    return _is_visible(layout, bits_ref, part, row, position)


def _is_visible(layout: Layout, bits_ref, part: Part, row, position):
    ahead = position - part.committed_len  # 0 for the first row's own position
    if bits_ref is None:
        is_visible = ahead * layout.group <= row  # ahead <= row // group, without the division
    else:
        bits = jnp.zeros(row.shape, jnp.int32)
        for w in range(layout.num_rows):
            is_row = (row >= w * layout.group) & (row < (w + 1) * layout.group)
            bits = jnp.where(is_row, bits_ref[part.slot * layout.num_rows + w], bits)
        is_ancestor = lax.shift_right_logical(bits, jnp.clip(ahead, 0, 31)) & 1
        is_visible = (ahead < 0) | ((ahead < layout.num_rows) & (is_ancestor == 1))
    return is_visible & (position < layout.num_positions)


def attended(layout: Layout, part: Part, first: jax.Array, shape: tuple[int, int], placed):
    """[positions, columns] in the layout `placed`: whether any row attends the position, the first being `first`."""
    end = jnp.minimum(part.committed_len + layout.num_rows, layout.num_positions)
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=placed) + first < end


def produce(layout: Layout, gmem: Refs, share: Share, copy_block, init, empty_barriers: list) -> None:
    """The producer warpgroup: runs `copy_block(starts, kv_head, carry)` for each block of the CTA's parts.

    `starts` are the pool rows where the block's page pieces start; what it returns is the next one's carry, the first
    is `init`. At the end the producer waits for all of `empty_barriers`: nobody leaves while a consumer still reads.
    """
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

    def part_step(part: Part, carry):
        def step(block, carry):
            carry, starts = carry
            # The next block's page ids are under way while this block waits for its stage.
            following = page_rows(part.slot, jnp.minimum(block + 1, part.last - 1))
            return copy_block(starts, part.kv_head, carry), following

        starts = page_rows(part.slot, part.first)
        return lax.fori_loop(part.first, part.last, step, (carry, starts))[0]

    for_each_part(layout, gmem.lens, share, part_step, init)
    for barrier in empty_barriers:
        plgpu.barrier_wait(barrier)


def produce_whole_blocks(layout: Layout, gmem: Refs, share: Share, scratch: dict) -> None:
    """The producer of a ring whose stages hold the keys of a block, and its values if they are apart."""
    rows = min(layout.page_size, layout.block)
    names = "k" if layout.is_latent else "kv"

    def copy_block(starts: tuple[jax.Array, ...], kv_head: jax.Array, stage: jax.Array) -> jax.Array:
        for name in names:
            src, channels = (gmem.k, layout.k_channels) if name == "k" else (gmem.v, layout.v_channels)
            plgpu.barrier_wait(scratch[f"{name}_empty"].at[stage])
            for piece, start in enumerate(starts):
                plgpu.copy_gmem_to_smem(
                    src.at[page_piece(start, rows), _columns(kv_head, channels, layout.num_kv_heads)],
                    scratch[f"{name}_smem"].at[stage, pl.ds(piece * rows, rows)],
                    scratch[f"{name}_full"].at[stage],
                )
        return next_stage(layout, stage)

    empty = [scratch[f"{name}_empty"].at[stage] for stage in range(layout.num_stages) for name in names]
    produce(layout, gmem, share, copy_block, jnp.int32(0), empty)


def page_piece(start: jax.Array, rows: int):
    """Rows of the pool that one copy takes."""
    return pl.ds(_aligned(start, rows), rows)


def _aligned(start: jax.Array, multiple: int) -> jax.Array:
    return pl.multiple_of(start, multiple)


def _columns(kv_head: jax.Array, channels: int, num_kv_heads: int):
    if num_kv_heads == 1:
        return pl.ds(0, channels)
    return pl.ds(pl.multiple_of(kv_head * channels, COLUMNS), channels)
