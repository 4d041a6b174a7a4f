"""The oracle, and the path for CPUs: gathers pages a block at a time, float32 softmax kept online over the blocks.

Blocks end where the longest slot ends, so cost follows lengths and not the width of the page table (`../NOTES.md` has
the figures). A block that a row does not attend leaves the row's sums as they were. On a
CPU a row of a chain has the same bits whatever the number of rows and slots of the call.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.paged_attention.contract import PagedAttentionConfig, Problem

_BLOCK_POSITIONS = 128
_MASKED = -1e30  # finite: a row that has attended nothing yet must not compute inf - inf
_BITS = 32


def supports(problem: Problem) -> str | None:  # noqa: ARG001
    """None: everything that the contract allows."""
    return None


class _Sums(NamedTuple):
    """What a row knows after some blocks: softmax over them is `out / total`, scaled by exp(-top)."""

    top_BGWJ: jax.Array
    total_BGWJ: jax.Array
    out_BGWJE: jax.Array
    met_nonfinite_BW: jax.Array


def paged_attention_reference(
    q_BWHC: jax.Array,
    k_pages_NZGC: jax.Array,
    v_pages_NZGE: jax.Array | None,
    page_table_BP: jax.Array,
    committed_len_B: jax.Array,
    ancestor_bits_BW: jax.Array | None,
    *,
    config: PagedAttentionConfig,
) -> jax.Array:
    """[B, W, H, E] in q's dtype; see `contract`. Any number of rows; float32 arithmetic whatever the dtype.

    A value that is not finite and is attended makes the whole row NaN, in every head: it is shown, not averaged away.
    """
    num_slots, num_rows, num_heads, k_channels = q_BWHC.shape
    num_pages, page_size, num_kv_heads, _ = k_pages_NZGC.shape
    num_positions = page_table_BP.shape[1] * page_size
    pages_per_block = max(1, min(_BLOCK_POSITIONS // page_size, page_table_BP.shape[1]))
    block_len = pages_per_block * page_size

    is_page_BP = (page_table_BP >= 0) & (page_table_BP < num_pages)
    table_BP = jnp.where(is_page_BP, page_table_BP, 0).astype(jnp.int32)
    table_BP = jnp.pad(table_BP, ((0, 0), (0, -table_BP.shape[1] % pages_per_block)))
    # A length past the table attends all of it; bounded here, sums of lengths cannot wrap around.
    base_B = jnp.clip(committed_len_B, -1, num_positions).astype(jnp.int32)
    by_group = (num_slots, num_rows, num_kv_heads, num_heads // num_kv_heads, k_channels)
    q_BGWJC = (q_BWHC.astype(jnp.float32) * config.scale).reshape(by_group).transpose(0, 2, 1, 3, 4)

    def attend_block(index: jax.Array, sums: _Sums) -> _Sums:
        ids_BQ = lax.dynamic_slice_in_dim(table_BP, index * pages_per_block, pages_per_block, axis=1)
        k_BSGC = _gather(k_pages_NZGC, ids_BQ)
        v_BSGE = k_BSGC[..., : config.v_channels] if v_pages_NZGE is None else _gather(v_pages_NZGE, ids_BQ)
        position_S = index * block_len + jnp.arange(block_len, dtype=jnp.int32)
        attended_BWS = (
            _attended(position_S, base_B, num_rows, ancestor_bits_BW) & (position_S < num_positions)[None, None]
        )

        # A weight of zero does not stop NaN or inf (0 * NaN is NaN), so such values are taken out before the product.
        is_finite_BSGE = jnp.isfinite(v_BSGE)
        is_bad_BS = ~jnp.all(is_finite_BSGE, axis=(2, 3))
        v_BSGE = jnp.where(is_finite_BSGE, v_BSGE, 0.0)
        met_nonfinite_BW = sums.met_nonfinite_BW | jnp.any(attended_BWS & is_bad_BS[:, None, :], axis=-1)

        attended_BGWJS = attended_BWS[:, None, :, None, :]
        scores = jnp.einsum("bgwjc,bsgc->bgwjs", q_BGWJC, k_BSGC, precision=lax.Precision.HIGHEST)
        scores = jnp.where(attended_BGWJS, scores, _MASKED)
        top_BGWJ = jnp.maximum(sums.top_BGWJ, jnp.max(scores, axis=-1))
        weights = jnp.where(attended_BGWJS, jnp.exp(scores - top_BGWJ[..., None]), 0.0)
        decay_BGWJ = jnp.exp(sums.top_BGWJ - top_BGWJ)
        # A product, not jnp.sum: on CPUs that one adds in another order when there are few rows.
        ones_S = jnp.ones(block_len, jnp.float32)
        block_total_BGWJ = jnp.einsum("bgwjs,s->bgwj", weights, ones_S, precision=lax.Precision.HIGHEST)
        out_BGWJE = jnp.einsum("bgwjs,bsge->bgwje", weights, v_BSGE, precision=lax.Precision.HIGHEST)
        return _Sums(
            top_BGWJ,
            sums.total_BGWJ * decay_BGWJ + block_total_BGWJ,
            sums.out_BGWJE * decay_BGWJ[..., None] + out_BGWJE,
            met_nonfinite_BW,
        )

    shape_BGWJ = q_BGWJC.shape[:-1]
    nothing = _Sums(
        jnp.full(shape_BGWJ, _MASKED, jnp.float32),
        jnp.zeros(shape_BGWJ, jnp.float32),
        jnp.zeros((*shape_BGWJ, config.v_channels), jnp.float32),
        jnp.zeros((num_slots, num_rows), bool),
    )
    longest = jnp.max(jnp.where(base_B >= 0, base_B + num_rows, 0))
    num_blocks = jnp.minimum(-(-longest // block_len), table_BP.shape[1] // pages_per_block)
    sums = lax.fori_loop(0, num_blocks, attend_block, nothing)

    is_dead_BGWJ = sums.total_BGWJ == 0.0
    out_BGWJE = sums.out_BGWJE / jnp.where(is_dead_BGWJ, 1.0, sums.total_BGWJ)[..., None]
    out_BWHE = out_BGWJE.transpose(0, 2, 1, 3, 4).reshape(num_slots, num_rows, num_heads, config.v_channels)
    return jnp.where(sums.met_nonfinite_BW[..., None, None], jnp.nan, out_BWHE).astype(q_BWHC.dtype)


def _gather(pages_NZGC: jax.Array, ids_BQ: jax.Array) -> jax.Array:
    """The pages' positions one after the other, in float32: [B, Q * Z, G, C]."""
    pages_BQZGC = pages_NZGC[ids_BQ]
    return pages_BQZGC.reshape(ids_BQ.shape[0], -1, *pages_NZGC.shape[2:]).astype(jnp.float32)


def _attended(position_S: jax.Array, base_B: jax.Array, num_rows: int, ancestor_bits_BW: jax.Array | None) -> jax.Array:
    """[B, W, S]: which rows attend which positions."""
    ahead_B1S = (position_S[None, :] - base_B[:, None])[:, None, :]  # 0 at the first row's own position
    if ancestor_bits_BW is None:
        is_attended_BWS = ahead_B1S <= jnp.arange(num_rows, dtype=jnp.int32)[None, :, None]
    else:
        shift_B1S = jnp.clip(ahead_B1S, 0, _BITS - 1).astype(jnp.uint32)
        is_ancestor_BWS = (ancestor_bits_BW.astype(jnp.uint32)[..., None] >> shift_B1S) & 1 == 1
        is_attended_BWS = (ahead_B1S < 0) | ((ahead_B1S < _BITS) & is_ancestor_BWS)
    return is_attended_BWS & (base_B >= 0)[:, None, None]
