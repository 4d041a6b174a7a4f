"""Paged attention in float32 on the GPU's ordinary units: for exactness checks, not for speed.

The matrix units round float32 to 11 bits of mantissa, so float32 pages cannot use them. One CTA attends one query row:
it walks the row's context in blocks of 64 positions, and what the row does not attend never meets its sums.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_BLOCK = 64
_COLUMNS = 64  # channels that one copy moves and one register tile holds
_MASKED = -1e30
_PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)


@dataclass(frozen=True)
class ExactLayout:
    """The static sizes of a call."""

    num_rows: int  # W
    group: int  # query heads per key head
    num_kv_heads: int
    k_channels: int
    v_channels: int
    page_size: int
    pages_per_slot: int
    num_pages: int
    is_latent: bool
    scale: float

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def num_positions(self) -> int:
        return self.page_size * self.pages_per_slot


def attend_exact(
    layout: ExactLayout,
    lens_B: jax.Array,
    table: jax.Array,
    bits: jax.Array | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    *,
    interpret: object = None,
) -> jax.Array:
    """Output rows [R, E] for query rows `q` [R, C], ordered (slot, row, head); `k`, `v` are [N * Z, G * channels]."""
    num_copies = max(1, _BLOCK // layout.page_size) * (
        layout.k_channels // _COLUMNS + (0 if layout.is_latent else layout.v_channels // _COLUMNS)
    )

    def body(*refs, **scratch):
        it = iter(refs)
        lens_ref, table_ref = next(it), next(it)
        bits_ref = None if bits is None else next(it)
        q_ref, k_ref = next(it), next(it)
        v_ref = None if v is None else next(it)
        out_ref = next(it)
        index = lax.axis_index("row")
        slot = lax.div(index, layout.num_rows * layout.num_heads)
        row = lax.rem(lax.div(index, layout.num_heads), layout.num_rows)
        kv_head = lax.div(lax.rem(index, layout.num_heads), layout.group)
        base = lens_ref[slot]
        row_bits = None if bits_ref is None else bits_ref[slot * layout.num_rows + row]

        plgpu.copy_gmem_to_smem(q_ref.at[index], scratch["q_smem"], scratch["q_full"])
        plgpu.barrier_wait(scratch["q_full"])

        def step(block, carry):
            _load_block(layout, scratch, table_ref, k_ref, v_ref, slot, kv_head, block)
            return _attend_block(layout, scratch, block, base, row, row_bits, carry)

        last_row = row if bits_ref is None else layout.num_rows - 1
        end = jnp.where(base >= 0, jnp.minimum(base + last_row + 1, layout.num_positions), 0)
        num_blocks = lax.div(end + (_BLOCK - 1), _BLOCK)
        column = plgpu.layout_cast(jnp.zeros((_COLUMNS,), jnp.float32), _PER_COLUMN)
        outs = (column,) * (layout.v_channels // _COLUMNS)
        outs, _, total = lax.fori_loop(0, num_blocks, step, (outs, column + _MASKED, column))
        for piece, out in enumerate(outs):
            scaled = out / jnp.where(total == 0.0, 1.0, total)
            scratch["out_smem"][pl.ds(piece * _COLUMNS, _COLUMNS)] = scaled
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch["out_smem"], out_ref.at[index])
        plgpu.wait_smem_to_gmem(0)

    body.__name__ = "paged_attention_mosaic_gpu_exact"
    scratch_types = {
        "q_smem": plgpu.SMEM((layout.k_channels,), jnp.float32),
        "out_smem": plgpu.SMEM((layout.v_channels,), jnp.float32),
        "k_smem": plgpu.SMEM((layout.k_channels // _COLUMNS, _BLOCK, _COLUMNS), jnp.float32),
        "q_full": plgpu.Barrier(),
        "full": plgpu.Barrier(num_arrivals=num_copies),
    }
    if v is not None:
        scratch_types["v_smem"] = plgpu.SMEM((layout.v_channels // _COLUMNS, _BLOCK, _COLUMNS), jnp.float32)
    operands = [lens_B, table, *([] if bits is None else [bits]), q, k, *([] if v is None else [v])]
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((q.shape[0], layout.v_channels), jnp.float32),
        scratch_types=scratch_types,
        grid=(q.shape[0],),
        grid_names=("row",),
        interpret=interpret,
    )(*operands)


def _load_block(layout: ExactLayout, scratch, table_ref, k_ref, v_ref, slot, kv_head, block) -> None:
    rows = min(layout.page_size, _BLOCK)
    for piece in range(_BLOCK // rows):
        first = block * _BLOCK + piece * rows
        index = lax.div(first, layout.page_size)
        page = table_ref[slot * layout.pages_per_slot + jnp.minimum(index, layout.pages_per_slot - 1)]
        is_valid = (page >= 0) & (page < layout.num_pages) & (index < layout.pages_per_slot)
        start = jnp.where(is_valid, page, 0) * layout.page_size + lax.rem(first, layout.page_size)
        copies = [(k_ref, scratch["k_smem"], layout.k_channels)]
        if not layout.is_latent:
            copies.append((v_ref, scratch["v_smem"], layout.v_channels))
        for src, dst, channels in copies:
            for column in range(0, channels, _COLUMNS):
                columns = pl.ds(pl.multiple_of(kv_head * channels + column, _COLUMNS), _COLUMNS)
                plgpu.copy_gmem_to_smem(
                    src.at[pl.ds(pl.multiple_of(start, rows), rows), columns],
                    dst.at[column // _COLUMNS, pl.ds(piece * rows, rows)],
                    scratch["full"],
                )
    plgpu.barrier_wait(scratch["full"])


def _attend_block(layout: ExactLayout, scratch, block, base, row, row_bits, carry):
    """Sums are kept once per channel, and so are the softmax's maximum and total, equal in every channel."""
    outs, top, total = carry
    shape = (_BLOCK, _COLUMNS)
    position = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + block * _BLOCK
    ahead = position - base
    if row_bits is None:
        seen = ahead <= row
    else:
        bits = jnp.where(ahead >= 0, row_bits, row_bits)
        is_ancestor = lax.shift_right_logical(bits, jnp.clip(ahead, 0, 31)) & 1
        seen = (ahead < 0) | ((ahead < layout.num_rows) & (is_ancestor == 1))
    seen = seen & (position < layout.num_positions)

    products = jnp.zeros(shape, jnp.float32)
    for piece in range(layout.k_channels // _COLUMNS):
        keys = plgpu.load(scratch["k_smem"].at[piece], layout=plgpu.Layout.WGMMA, optimized=False)
        at = pl.ds(piece * _COLUMNS, _COLUMNS)
        query = plgpu.load(scratch["q_smem"].at[at], layout=_PER_COLUMN, optimized=False)
        products = products + keys * lax.broadcast_in_dim(query, shape, [1])
    scores = lax.broadcast_in_dim(products.sum(axis=1) * (layout.scale * math.log2(math.e)), shape, [0])
    scores = jnp.where(seen, scores, _MASKED)

    new_top = jnp.maximum(top, scores.max(axis=0))
    weights = jnp.where(seen, jnp.exp2(scores - lax.broadcast_in_dim(new_top, shape, [1])), 0.0)
    decay = jnp.exp2(top - new_top)
    values_smem = scratch["k_smem" if layout.is_latent else "v_smem"]
    new_outs = []
    for piece, out in enumerate(outs):
        values = plgpu.load(values_smem.at[piece], layout=plgpu.Layout.WGMMA, optimized=False)
        new_outs.append(out * decay + (jnp.where(seen, values, 0.0) * weights).sum(axis=0))
    return tuple(new_outs), new_top, total * decay + weights.sum(axis=0)
