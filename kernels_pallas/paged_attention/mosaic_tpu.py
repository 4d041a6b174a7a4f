"""Paged attention on TPUs, in Pallas: pages copied by hand into VMEM, verify rows handled as decode rows."""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.contract import MAX_TREE_ROWS, PagedAttentionConfig, Problem
from kernels_pallas.paged_attention.mosaic_tpu_layout import (
    LANES,
    SUBLANES,
    VMEM_BYTES,
    TileConfig,
    default_tile,
    make_layout,
    pack,
    unpack,
    vmem_bytes,
)

_TABLE_BYTES = 512 << 10  # of 1 MiB of scalar memory


def supports(problem: Problem) -> str | None:
    """Why this backend cannot do the problem, or None."""
    if problem.dtype not in SUBLANES:
        return f"pages are {problem.dtype}; it must be bfloat16 or float32."
    sublanes = SUBLANES[problem.dtype]
    if problem.page_size % sublanes:
        return f"pages hold {problem.page_size} positions; with {problem.dtype} it must be a multiple of {sublanes}."
    if problem.k_channels % 64 or problem.v_channels % 64:
        return f"{problem.k_channels} key and {problem.v_channels} value channels; both must be multiples of 64."
    if problem.num_kv_heads > 1 and not problem.k_channels == problem.v_channels == LANES:
        return (
            f"{problem.k_channels} key and {problem.v_channels} value channels in {problem.num_kv_heads} heads; with "
            f"more than one head both must be {LANES}."
        )
    if problem.dtype == "bfloat16" and problem.num_kv_heads > 1 and problem.num_kv_heads % 2:
        return f"{problem.num_kv_heads} key heads in bfloat16; more than one must be an even number."
    if problem.has_ancestor_bits and problem.num_rows > MAX_TREE_ROWS:
        return f"{problem.num_rows} rows with ancestor bits; at most {MAX_TREE_ROWS}."
    table_bytes = 4 * problem.num_slots * (problem.pages_per_slot + 1 + problem.num_rows * problem.has_ancestor_bits)
    if table_bytes > _TABLE_BYTES:
        return (
            f"page tables and lengths of {problem.num_slots} slots are {table_bytes} bytes; at most {_TABLE_BYTES} fit "
            "into scalar memory."
        )
    needed = vmem_bytes(problem, default_tile(problem))
    if needed > VMEM_BYTES:
        return f"its smallest tile needs {needed} bytes of VMEM; {VMEM_BYTES} are given to the kernel."
    return None


def paged_attention_tpu(
    q_BWHC: jax.Array,
    k_pages_NZGC: jax.Array,
    v_pages_NZGE: jax.Array | None,
    page_table_BP: jax.Array,
    committed_len_B: jax.Array,
    ancestor_bits_BW: jax.Array | None,
    *,
    config: PagedAttentionConfig,
    tile: TileConfig | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See `contract`. Softmax and sums in float32, weights in the pages' dtype; output in q's dtype.

    A value that is attended and not finite makes the row NaN in the heads that attend it. `tile` None takes
    `default_tile`. `interpret` is Pallas' own switch to run without a TPU.

    Pools whose channels are a multiple of 128 are read where they lie. Others XLA keeps in an order of its own, and
    copies whole on every call: hold them padded.
    """
    # Pallas is slow to import: asking `supports` does not need it.
    from kernels_pallas.paged_attention.mosaic_tpu_attend import attend

    problem = Problem.of(q_BWHC, k_pages_NZGC, v_pages_NZGE, page_table_BP, ancestor_bits_BW, config)
    layout = make_layout(problem, k_pages_NZGC.shape[0], default_tile(problem) if tile is None else tile, config.scale)
    scalars = [page_table_BP.astype(jnp.int32).reshape(-1), committed_len_B.astype(jnp.int32)]
    if ancestor_bits_BW is not None:
        scalars.append(jax.lax.bitcast_convert_type(ancestor_bits_BW, jnp.int32).reshape(-1))
    pools = [
        pool.reshape(pool.shape[0], -1, pool.shape[3]) for pool in (k_pages_NZGC, v_pages_NZGE) if pool is not None
    ]
    q = pack(layout, q_BWHC.astype(k_pages_NZGC.dtype))
    return unpack(layout, attend(layout, scalars, q, pools, q_BWHC.dtype, interpret))
