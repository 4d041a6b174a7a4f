"""The oracle, and the path for CPUs: gathers pages block by block, softmax in float32, online over the blocks.

Only blocks that hold a visible position are read: cost follows the longest slot, not the table. A block that a row
does not see leaves its sums untouched to the bit, so a row's result does not depend on what else is in the call.
"""

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.paged_attention.contract import PagedAttentionConfig, Problem

_BLOCK_POSITIONS = 128
_MASKED = -1e30  # finite: a row that has seen nothing yet must not compute inf - inf


def supports(problem: Problem) -> str | None:  # noqa: ARG001
    """Everything that the contract allows."""
    return None


def paged_attention_reference(
    q_BWHC: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    page_table_BP: jax.Array,
    committed_len_B: jax.Array,
    ancestor_bits_BW: jax.Array | None,
    *,
    config: PagedAttentionConfig,
) -> jax.Array:
    """See `contract`. Any number of rows; float32 arithmetic whatever the dtype; output in q's dtype."""
    num_slots, num_rows, num_heads, k_channels = q_BWHC.shape
    num_pages, page_size, num_kv_heads, _ = k_pages.shape
    group = num_heads // num_kv_heads
    pages_per_block = max(1, min(_BLOCK_POSITIONS // page_size, page_table_BP.shape[1]))
    block = pages_per_block * page_size
    num_positions = page_table_BP.shape[1] * page_size
    table_BP = jnp.where((page_table_BP >= 0) & (page_table_BP < num_pages), page_table_BP, 0)
    table_BP = jnp.pad(table_BP, ((0, 0), (0, -table_BP.shape[1] % pages_per_block)))
    q_BGWJC = (q_BWHC.astype(jnp.float32) * config.scale).reshape(
        num_slots, num_rows, num_kv_heads, group, k_channels
    ).transpose(0, 2, 1, 3, 4)

    def visible(position_S: jax.Array) -> jax.Array:
        """[B, W, S]: which rows attend which positions."""
        base_B11 = committed_len_B[:, None, None]
        ahead_B1S = position_S[None, None, :] - base_B11  # 0 for the first row's own position
        if ancestor_bits_BW is None:
            is_visible = ahead_B1S <= jnp.arange(num_rows, dtype=jnp.int32)[None, :, None]
        else:
            shift_B1S = jnp.clip(ahead_B1S, 0, 31).astype(jnp.uint32)
            is_ancestor = (ancestor_bits_BW.astype(jnp.uint32)[..., None] >> shift_B1S) & 1
            is_visible = (ahead_B1S < 0) | ((ahead_B1S < 32) & (is_ancestor == 1))
        return is_visible & (base_B11 >= 0) & (position_S < num_positions)[None, None, :]

    def attend_block(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top_BGWJ, total_BGWJ, out_BGWJE, is_poisoned_BW = sums
        ids_BQ = lax.dynamic_slice_in_dim(table_BP, index * pages_per_block, pages_per_block, axis=1)
        k_BSGC = k_pages[ids_BQ].reshape(num_slots, block, num_kv_heads, k_channels).astype(jnp.float32)
        if v_pages is None:
            v_BSGE = k_BSGC[..., : config.v_channels]
        else:
            v_BSGE = v_pages[ids_BQ].reshape(num_slots, block, num_kv_heads, config.v_channels).astype(jnp.float32)
        visible_BWS = visible(index * block + jnp.arange(block, dtype=jnp.int32))
        # A value that is NaN would reach every row of the slot through 0 * NaN; it must reach those that attend it only.
        is_nan_BSGE = jnp.isnan(v_BSGE)
        is_nan_BS = jnp.any(is_nan_BSGE, axis=(2, 3))
        is_poisoned_BW |= jnp.any(visible_BWS & is_nan_BS[:, None, :], axis=-1)
        v_BSGE = jnp.where(is_nan_BSGE, 0.0, v_BSGE)

        scores = jnp.einsum("bgwjc,bsgc->bgwjs", q_BGWJC, k_BSGC, precision=lax.Precision.HIGHEST)
        visible_BGWJS = visible_BWS[:, None, :, None, :]
        scores = jnp.where(visible_BGWJS, scores, _MASKED)
        new_top = jnp.maximum(top_BGWJ, jnp.max(scores, axis=-1))
        weights = jnp.where(visible_BGWJS, jnp.exp(scores - new_top[..., None]), 0.0)
        decay = jnp.exp(top_BGWJ - new_top)
        block_out = jnp.einsum("bgwjs,bsge->bgwje", weights, v_BSGE, precision=lax.Precision.HIGHEST)
        return (
            new_top,
            total_BGWJ * decay + jnp.sum(weights, axis=-1),
            out_BGWJE * decay[..., None] + block_out,
            is_poisoned_BW,
        )

    heads_shape = (num_slots, num_kv_heads, num_rows, group)
    sums = (
        jnp.full(heads_shape, _MASKED, jnp.float32),
        jnp.zeros(heads_shape, jnp.float32),
        jnp.zeros((*heads_shape, config.v_channels), jnp.float32),
        jnp.zeros((num_slots, num_rows), bool),
    )
    longest = jnp.max(jnp.where(committed_len_B >= 0, committed_len_B + num_rows, 0))
    num_blocks = jnp.minimum(-(-longest // block), table_BP.shape[1] // pages_per_block)
    _, total_BGWJ, out_BGWJE, is_poisoned_BW = lax.fori_loop(0, num_blocks, attend_block, sums)
    out_BGWJE = out_BGWJE / jnp.where(total_BGWJ == 0.0, 1.0, total_BGWJ)[..., None]
    out_BWHE = out_BGWJE.transpose(0, 2, 1, 3, 4).reshape(num_slots, num_rows, num_heads, config.v_channels)
    return jnp.where(is_poisoned_BW[..., None, None], jnp.nan, out_BWHE).astype(q_BWHC.dtype)
