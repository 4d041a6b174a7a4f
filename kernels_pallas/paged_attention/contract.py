"""The contract that every paged-attention backend fulfils.

    out_BWHE = run(q_BWHC, k_pages_NZGC, v_pages_NZGE | None, page_table_BP, committed_len_B, ancestor_bits_BW | None)

Query row w of slot b sits at position c + w, with c = committed_len[b]; the keys and values of all W rows are in the
pages already. Position p lives at page `page_table[b, p // Z]`, offset `p % Z`.
- No ancestor bits: row w attends positions 0..c+w.
- With them (uint32 a row; a row always has its own bit): positions 0..c-1, and c+j for every bit j set.
- `v_pages` None: the values are the first `v_channels` channels of the keys (absorbed MLA, G = 1).
- c < 0 marks a dead slot: nothing is read, its output is zero.
- Page ids outside 0..N-1 are read as the null page 0; positions past the table are attended by nobody. With
  `config.debug` both are reported instead (`api.check_values`).
- What a row must not attend never reaches its output, NaN included. Softmax is taken in float32, whatever the dtype.
- Without ancestor bits a row's output does not depend on W, beyond the order of float32 sums.
- Rows may be any number; a backend for accelerators states its own range (1..8) in `supports`.
- Lengths are device arrays, so no backend can see a length that the host guessed.

B slots, W rows a slot, H query heads, G key/value heads, C key channels, E value channels, P page-table entries,
N pages, Z positions a page.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

MAX_TREE_ROWS = 32
"""Rows that ancestor bits can speak of."""


@dataclass(frozen=True)
class PagedAttentionConfig:
    """What is static about a call. `scale` multiplies the scores; `v_channels` E is the width of the output."""

    backend: str
    scale: float
    v_channels: int
    debug: bool = False


@dataclass(frozen=True)
class Problem:
    """The static shape facts of a call: what a backend needs to say whether it can."""

    num_slots: int  # B
    num_rows: int  # W
    num_q_heads: int  # H
    num_kv_heads: int  # G
    k_channels: int  # C
    v_channels: int  # E
    page_size: int  # Z
    pages_per_slot: int  # P
    dtype: str
    is_latent: bool
    has_ancestor_bits: bool

    @classmethod
    def of(
        cls,
        q_BWHC: jax.Array,
        k_pages_NZGC: jax.Array,
        v_pages_NZGE: jax.Array | None,
        page_table_BP: jax.Array,
        ancestor_bits_BW: jax.Array | None,
        config: PagedAttentionConfig,
    ) -> "Problem":
        """Reads the facts off a call's arrays."""
        num_slots, num_rows, num_q_heads, k_channels = q_BWHC.shape
        return cls(
            num_slots=num_slots,
            num_rows=num_rows,
            num_q_heads=num_q_heads,
            num_kv_heads=k_pages_NZGC.shape[2],
            k_channels=k_channels,
            v_channels=config.v_channels,
            page_size=k_pages_NZGC.shape[1],
            pages_per_slot=page_table_BP.shape[1],
            dtype=jnp.dtype(k_pages_NZGC.dtype).name,
            is_latent=v_pages_NZGE is None,
            has_ancestor_bits=ancestor_bits_BW is not None,
        )


@dataclass(frozen=True)
class Backend:
    """One implementation of the contract.

    `run` takes the contract's arguments, `supports` gives the reason why not, or None. `supports_device_lengths` says
    that lengths are read on the device; a backend that needs them on the host would see uncorrected ones. Pools whose
    channels are a multiple of `channel_multiple` are read where they lie, others may be copied first: who owns a pool
    fills it up with zero channels, which change no score.
    """

    run: Callable[..., jax.Array]
    supports: Callable[[Problem], str | None]
    supports_device_lengths: bool
    channel_multiple: int = 1
