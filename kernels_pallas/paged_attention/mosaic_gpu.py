"""Paged attention on NVIDIA Hopper, in Pallas Mosaic GPU: TMA page loads, wgmma, warp specialisation."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.contract import PagedAttentionConfig, Problem
from kernels_pallas.paged_attention.mosaic_gpu_schedule import TILE, Layout
from kernels_pallas.paged_attention.mosaic_gpu_tile import (
    MAX_NARROW,
    SMEM_BYTES,
    TileConfig,
    default_tile,
    is_turned,
    is_wide,
    smem_bytes,
    tuned_tile,
)

_PAGE_SIZES = (16, 32, 64, 128)
_OLDEST_JAX = (0, 11)
MAX_ROWS = 1024
"""Query rows a slot: a few of a decoding step, or a chunk of a prompt."""


def supports(problem: Problem) -> str | None:
    """Why this backend cannot do the problem, or None."""
    if jax.__version_info__ < _OLDEST_JAX:
        return f"jax is {jax.__version__}; its Mosaic GPU kernels need {'.'.join(map(str, _OLDEST_JAX))} or newer."
    if problem.dtype not in ("bfloat16", "float32"):
        return f"pages are {problem.dtype}; it must be bfloat16, or float32 for the exact (slow) path."
    if problem.page_size not in _PAGE_SIZES:
        return f"pages hold {problem.page_size} positions; it must be one of {_PAGE_SIZES}."
    if problem.k_channels % 64 or problem.v_channels % 64:
        return f"{problem.k_channels} key and {problem.v_channels} value channels; both must be multiples of 64."
    if problem.v_channels > 512 or (is_wide(problem) and problem.v_channels % 128):
        return f"{problem.v_channels} value channels; at most 512, above {MAX_NARROW} a multiple of 128."
    if is_wide(problem) and not problem.is_latent and problem.dtype != "float32":
        return (
            f"{problem.v_channels} value channels beside the keys; more than {MAX_NARROW} only as part of them (MLA)."
        )
    if problem.num_rows > MAX_ROWS:
        return f"{problem.num_rows} query rows a slot; at most {MAX_ROWS}."
    if problem.dtype == "float32":
        bytes_needed = 64 * 4 * (problem.k_channels + (0 if problem.is_latent else problem.v_channels)) + 8 * 1024
    else:
        default = default_tile(problem)
        bytes_needed = smem_bytes(problem, default if is_wide(problem) else replace(default, num_stages=2))
    if bytes_needed > SMEM_BYTES:
        return f"{problem.k_channels} key channels: two blocks of context do not fit into shared memory."
    return None


def make_layout(problem: Problem, num_pages: int, tile: TileConfig) -> Layout:
    """The kernels' static sizes. Packed rows fill tiles of 64; fewer are rounded up to 8."""
    group = problem.num_q_heads // problem.num_kv_heads
    rows = problem.num_rows * group
    num_row_tiles = -(-rows // TILE)
    tile_rows = TILE if num_row_tiles > 1 else -(-rows // 8) * 8
    return Layout(
        num_slots=problem.num_slots,
        num_rows=problem.num_rows,
        group=group,
        num_kv_heads=problem.num_kv_heads,
        k_channels=problem.k_channels,
        v_channels=problem.v_channels,
        page_size=problem.page_size,
        pages_per_slot=problem.pages_per_slot,
        num_pages=num_pages,
        tile_rows=tile_rows,
        out_rows=TILE if is_wide(problem) and not is_turned(problem) else tile_rows,
        num_row_tiles=num_row_tiles,
        is_latent=problem.is_latent,
        is_tree=problem.has_ancestor_bits,
        block=tile.block,
        num_stages=tile.num_stages,
        overhead=tile.overhead,
        min_share=tile.min_share,
        slack=tile.slack,
        num_ctas=tile.num_ctas,
        is_turned=is_turned(problem),
    )


def paged_attention_gpu(
    q_BWHC: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    page_table_BP: jax.Array,
    committed_len_B: jax.Array,
    ancestor_bits_BW: jax.Array | None,
    *,
    config: PagedAttentionConfig,
    tile: TileConfig | None = None,
    interpret: object = None,
) -> jax.Array:
    """See `contract`. Softmax and sums in float32, weights in bf16; output in q's dtype. Float32 pages: all in float32.

    `tile` None takes `tuned_tile`; float32 pages have none. `interpret` is Pallas' own switch to run without a GPU.
    """
    problem = Problem.of(q_BWHC, k_pages, v_pages, page_table_BP, ancestor_bits_BW, config)
    num_pages, page_size, num_kv_heads, k_channels = k_pages.shape
    lens_B = committed_len_B.astype(jnp.int32)
    table = page_table_BP.astype(jnp.int32).reshape(-1)
    bits = None
    if ancestor_bits_BW is not None:
        bits = jax.lax.bitcast_convert_type(ancestor_bits_BW.astype(jnp.uint32), jnp.int32).reshape(-1)
    k = k_pages.reshape(num_pages * page_size, num_kv_heads * k_channels)
    v = None if v_pages is None else v_pages.reshape(num_pages * page_size, num_kv_heads * config.v_channels)
    if problem.dtype == "float32":
        rows = q_BWHC.astype(jnp.float32).reshape(-1, k_channels)
        out = _attend_float32(problem, num_pages, config.scale, interpret, lens_B, table, bits, rows, k, v)
        return out.reshape(*q_BWHC.shape[:3], config.v_channels).astype(q_BWHC.dtype)
    layout = make_layout(problem, num_pages, tile or tuned_tile(problem, jax.devices()[0].device_kind))
    return _attend_bfloat16(layout, config.scale, interpret, q_BWHC, lens_B, table, bits, k, v)


# Mosaic GPU needs a package (absl-py) that jax does not bring along: asking `supports` must work without it, so these
# import it when they are called. They are compiled as functions of their own: a model's layers then share one lowering.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _attend_float32(
    problem: Problem, num_pages: int, scale: float, interpret: object, lens_B, table, bits, rows, k, v
) -> jax.Array:
    from kernels_pallas.paged_attention.mosaic_gpu_exact import ExactLayout, attend_exact

    layout = ExactLayout(
        num_rows=problem.num_rows,
        group=problem.num_q_heads // problem.num_kv_heads,
        num_kv_heads=problem.num_kv_heads,
        k_channels=problem.k_channels,
        v_channels=problem.v_channels,
        page_size=problem.page_size,
        pages_per_slot=problem.pages_per_slot,
        num_pages=num_pages,
        is_latent=problem.is_latent,
        scale=scale,
    )
    return attend_exact(layout, lens_B, table, bits, rows, k, v, interpret=interpret)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _attend_bfloat16(layout: Layout, scale: float, interpret: object, q_BWHC, lens_B, table, bits, k, v) -> jax.Array:
    from kernels_pallas.paged_attention.mosaic_gpu_attend import attend
    from kernels_pallas.paged_attention.mosaic_gpu_combine import combine
    from kernels_pallas.paged_attention.mosaic_gpu_latent import attend_latent
    from kernels_pallas.paged_attention.mosaic_gpu_turned import attend_turned
    from kernels_pallas.paged_attention.mosaic_gpu_turned_combine import combine_turned

    q = _pack(layout, q_BWHC.astype(k.dtype))
    out_ref = jax.new_ref(jnp.empty((layout.num_items * layout.out_rows, layout.v_channels), q.dtype))
    operands = (lens_B, table, bits, q, k)
    if layout.is_turned:
        parts = attend_turned(layout, scale, *operands, out_ref, interpret=interpret)
        combine_turned(layout, lens_B, *parts, out_ref, interpret=interpret)
        return _unpack(layout, jax.freeze(out_ref)).astype(q_BWHC.dtype)
    if layout.v_channels > MAX_NARROW:
        parts = attend_latent(layout, scale, *operands, out_ref, interpret=interpret)
    else:
        parts = attend(layout, scale, *operands, v, out_ref, interpret=interpret)
    combine(layout, lens_B, *parts, out_ref, interpret=interpret)
    return _unpack(layout, jax.freeze(out_ref)).astype(q_BWHC.dtype)


def _pack(layout: Layout, q_BWHC: jax.Array) -> jax.Array:
    """[items * tile_rows, C]: the rows of a slot and key head together, as (row, head of the group)."""
    channels = q_BWHC.shape[-1]
    rows = layout.num_rows * layout.group
    q = q_BWHC.reshape(layout.num_slots, layout.num_rows, layout.num_kv_heads, layout.group, channels)
    q = q.transpose(0, 2, 1, 3, 4).reshape(layout.num_slots * layout.num_kv_heads, rows, channels)
    padding = layout.num_row_tiles * layout.tile_rows - rows
    return jnp.pad(q, ((0, 0), (0, padding), (0, 0))).reshape(-1, channels)


def _unpack(layout: Layout, out: jax.Array) -> jax.Array:
    rows = layout.num_rows * layout.group
    out = out.reshape(layout.num_slots, layout.num_kv_heads, layout.num_row_tiles * layout.out_rows, layout.v_channels)
    out = out[:, :, :rows].reshape(
        layout.num_slots, layout.num_kv_heads, layout.num_rows, layout.group, layout.v_channels
    )
    return out.transpose(0, 2, 1, 3, 4).reshape(layout.num_slots, layout.num_rows, -1, layout.v_channels)
