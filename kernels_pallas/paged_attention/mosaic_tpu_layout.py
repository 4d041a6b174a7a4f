"""How the TPU kernel cuts its work: tiles of rows, blocks of pages, and what of it fits into VMEM."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.contract import Problem

VMEM_BYTES = 32 << 20
"""What the kernel may take of 64 MiB or more."""

SUBLANES = {"bfloat16": 16, "float32": 8}
"""Rows of a register, by dtype."""

LANES = 128
_BLOCK_BYTES = 2 << 20
_MAX_BLOCK = 512
_MAX_PACKED_ROWS = 1024
_DECODE_ROWS = 8


@dataclass(frozen=True)
class TileConfig:
    """How the work is cut: `block_pages` pages a copy step, `tile_rows` query rows that share what is copied."""

    block_pages: int
    tile_rows: int


@dataclass(frozen=True)
class Layout:
    """The kernel's static sizes. A tile holds `tile_rows` query rows: `packed_rows` of them with their heads."""

    num_slots: int  # B
    num_rows: int  # W
    tile_rows: int
    num_tiles: int
    packed_rows: int  # M: tile_rows * group, and padding up to the sublanes of a register
    group: int  # J: query heads of one key head
    num_kv_heads: int  # G
    k_channels: int  # C
    v_channels: int  # E
    page_size: int  # Z
    pages_per_slot: int  # P
    num_pages: int  # N
    block_pages: int
    scale: float
    dtype: str
    is_latent: bool
    has_bits: bool

    @property
    def block(self) -> int:
        """S: positions of a block."""
        return self.block_pages * self.page_size

    @property
    def num_positions(self) -> int:
        """Positions that the page table speaks of."""
        return self.pages_per_slot * self.page_size

    @property
    def num_scores(self) -> int:
        """Of full page tables, as all of these: lengths are on the device, so they are upper bounds."""
        return self.num_slots * self.num_rows * self.group * self.num_kv_heads * self.num_positions

    @property
    def flops(self) -> int:
        """Of both products."""
        return 2 * self.num_scores * (self.k_channels + self.v_channels)

    @property
    def bytes_accessed(self) -> int:
        """Pages once a row tile, queries and outputs once."""
        pool_channels = self.k_channels + (0 if self.is_latent else self.v_channels)
        read = self.num_slots * self.num_tiles * self.num_positions * self.num_kv_heads * pool_channels
        rows = self.num_slots * self.num_rows * self.group * self.num_kv_heads * (self.k_channels + self.v_channels)
        return (read + rows) * jnp.dtype(self.dtype).itemsize

    @property
    def precision(self) -> jax.lax.Precision:
        """Float32 pages are there for exactness; bf16 products are exact in any precision."""
        return jax.lax.Precision.HIGHEST if self.dtype == "float32" else jax.lax.Precision.DEFAULT


def default_tile(problem: Problem) -> TileConfig:
    """Blocks of about 2 MiB, and one tile up to 8 rows; more rows are cut until a tile fits into VMEM.

    A decode step reads each page once; a prefill chunk reads the context once a tile.
    """
    tile_rows = problem.num_rows
    tile = TileConfig(_block_pages(problem, tile_rows), tile_rows)
    while tile_rows > 1 and not problem.has_ancestor_bits and not _is_comfortable(problem, tile):
        tile_rows = -(-tile_rows // 2)
        tile = TileConfig(_block_pages(problem, tile_rows), tile_rows)
    return tile


def make_layout(problem: Problem, num_pages: int, tile: TileConfig, scale: float) -> Layout:
    """The kernel's static sizes."""
    return Layout(
        num_slots=problem.num_slots,
        num_rows=problem.num_rows,
        tile_rows=tile.tile_rows,
        num_tiles=-(-problem.num_rows // tile.tile_rows),
        packed_rows=_packed_rows(problem, tile.tile_rows),
        group=problem.num_q_heads // problem.num_kv_heads,
        num_kv_heads=problem.num_kv_heads,
        k_channels=problem.k_channels,
        v_channels=problem.v_channels,
        page_size=problem.page_size,
        pages_per_slot=problem.pages_per_slot,
        num_pages=num_pages,
        block_pages=tile.block_pages,
        scale=scale,
        dtype=problem.dtype,
        is_latent=problem.is_latent,
        has_bits=problem.has_ancestor_bits,
    )


def vmem_bytes(problem: Problem, tile: TileConfig) -> int:
    """VMEM that the kernel takes: buffers and running sums, and an estimate of the arithmetic's temporaries."""
    item = jnp.dtype(problem.dtype).itemsize
    k_lanes, v_lanes = _to_multiple(problem.k_channels, LANES), _to_multiple(problem.v_channels, LANES)
    block = tile.block_pages * problem.page_size
    rows = problem.num_kv_heads * _packed_rows(problem, tile.tile_rows)
    buffers = 2 * block * problem.num_kv_heads * (k_lanes + (0 if problem.is_latent else v_lanes)) * item
    pipelined = 2 * rows * (k_lanes * item + v_lanes * 4)
    sums = rows * (v_lanes + 2 * LANES) * 4
    temporaries = 3 * rows * _to_multiple(block, LANES) * 4 + rows * v_lanes * 4 + block * (k_lanes + v_lanes) * 4
    return buffers + pipelined + sums + temporaries


def pack(layout: Layout, q_BWHC: jax.Array) -> jax.Array:
    """[B, tiles, G, M, C]: the rows of a tile and key head together, as (row, head of the group)."""
    missing_rows = layout.num_tiles * layout.tile_rows - layout.num_rows
    q = jnp.pad(q_BWHC, ((0, 0), (0, missing_rows), (0, 0), (0, 0)))
    q = q.reshape(layout.num_slots, layout.num_tiles, layout.tile_rows, layout.num_kv_heads, layout.group, -1)
    q = q.transpose(0, 1, 3, 2, 4, 5)
    q = q.reshape(*q.shape[:3], layout.tile_rows * layout.group, layout.k_channels)
    return jnp.pad(q, ((0, 0),) * 3 + ((0, layout.packed_rows - q.shape[3]), (0, 0)))


def unpack(layout: Layout, out: jax.Array) -> jax.Array:
    """[B, W, H, E] of [B, tiles, G, M, E]."""
    out = out[:, :, :, : layout.tile_rows * layout.group]
    out = out.reshape(*out.shape[:3], layout.tile_rows, layout.group, layout.v_channels).transpose(0, 1, 3, 2, 4, 5)
    out = out.reshape(layout.num_slots, layout.num_tiles * layout.tile_rows, -1, layout.v_channels)
    return out[:, : layout.num_rows]


def _packed_rows(problem: Problem, tile_rows: int) -> int:
    return _to_multiple(tile_rows * problem.num_q_heads // problem.num_kv_heads, SUBLANES[problem.dtype])


def _block_pages(problem: Problem, tile_rows: int) -> int:
    """Pages of a block: positions a multiple of the lanes where the table has so many."""
    channels = problem.k_channels + (0 if problem.is_latent else problem.v_channels)
    position_bytes = problem.num_kv_heads * channels * jnp.dtype(problem.dtype).itemsize
    packed = problem.num_kv_heads * _packed_rows(problem, tile_rows)
    most = min(_MAX_BLOCK, _BLOCK_BYTES // position_bytes, max(LANES, (1 << 18) // packed))
    step = math.lcm(LANES, problem.page_size)
    block = max(step, most // step * step)
    return min(block // problem.page_size, problem.pages_per_slot)


def _is_comfortable(problem: Problem, tile: TileConfig) -> bool:
    """Whether a tile is small enough not to be cut. Decode rows are cut only if VMEM does not hold them."""
    rows = problem.num_kv_heads * _packed_rows(problem, tile.tile_rows)
    is_small = tile.tile_rows <= _DECODE_ROWS or rows <= _MAX_PACKED_ROWS
    return is_small and vmem_bytes(problem, tile) <= VMEM_BYTES


def _to_multiple(number: int, of: int) -> int:
    return -(-number // of) * of
