"""Named real shapes, and inputs for them in which everything that must not be read is poison.

Tests, benchmarks and tuners take their shapes from here, so that what is timed is what was checked.

>>> spec = ARG_SPECS["mla_8_edges"]
>>> inputs = make_inputs(spec, jax.random.key(0))
>>> inputs.q_BWHC.shape, inputs.v_pages_NZGE is None
((6, 4, 8, 192), True)
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.paged_attention.contract import PagedAttentionConfig, Problem

NUM_SPARE_PAGES = 2
"""Pages of the pool that no slot owns, beside the null page; all of them are poison."""


class PagedInputs(NamedTuple):
    """A call's arrays, in the order of the contract."""

    q_BWHC: jax.Array
    k_pages_NZGC: jax.Array
    v_pages_NZGE: jax.Array | None
    page_table_BP: jax.Array
    committed_len_B: jax.Array
    ancestor_bits_BW: jax.Array | None


@dataclass(frozen=True)
class ArgSpec:
    """One call's shape. A negative length is a dead slot.

    `tree_parents` None: row w attends all rows before it. Else `tree_parents[w]` is the row that row w hangs on (-1 for
    the root, row 0), and rows attend their ancestors only.
    """

    num_q_heads: int  # H
    num_kv_heads: int  # G
    k_channels: int  # C
    v_channels: int  # E
    is_latent: bool
    page_size: int  # Z
    num_rows: int  # W
    committed_len: tuple[int, ...]  # of each slot
    scale: float
    tree_parents: tuple[int, ...] | None = None
    num_unused_entries: int = 3  # page-table entries behind the longest slot's last page
    dtype: str = "bfloat16"

    @property
    def pages_per_slot(self) -> int:
        """P: what the longest slot needs, and the entries that nobody uses."""
        return max(self.num_pages_of(length) for length in self.committed_len) + self.num_unused_entries

    @property
    def num_pages(self) -> int:
        """N: the null page, the slots' pages, the spare ones."""
        return 1 + sum(map(self.num_pages_of, self.committed_len)) + NUM_SPARE_PAGES

    @property
    def kv_bytes(self) -> int:
        """Size of the pool."""
        channels = self.k_channels + (0 if self.is_latent else self.v_channels)
        return self.num_pages * self.page_size * self.num_kv_heads * channels * jnp.dtype(self.dtype).itemsize

    def num_pages_of(self, length: int) -> int:
        """Pages that hold a slot's committed positions and its rows. A dead slot owns one, that nobody may read."""
        return 1 if length < 0 else -(-(length + self.num_rows) // self.page_size)

    def config(self, backend: str, *, debug: bool = False) -> PagedAttentionConfig:
        """The static part of the call."""
        return PagedAttentionConfig(backend=backend, scale=self.scale, v_channels=self.v_channels, debug=debug)

    def problem(self) -> Problem:
        """The shape facts that `supports` is asked about."""
        return Problem(
            num_slots=len(self.committed_len),
            num_rows=self.num_rows,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            k_channels=self.k_channels,
            v_channels=self.v_channels,
            page_size=self.page_size,
            pages_per_slot=self.pages_per_slot,
            dtype=self.dtype,
            is_latent=self.is_latent,
            has_ancestor_bits=self.tree_parents is not None,
        )


def make_inputs(spec: ArgSpec, key: jax.Array) -> PagedInputs:
    """Random inputs of a spec, with NaN wherever no row may look.

    That is the null page, pages nobody owns, dead slots' pages, and positions behind a slot's last row. Page ids are
    shuffled.
    Table entries behind a slot's last page hold, in turn, a poisoned page, -1, and an id past the pool.
    """
    q_key, k_key, v_key, table_key = jax.random.split(key, 4)
    table_BP, is_read_NZ = _tables(spec, np.random.default_rng(np.asarray(jax.random.key_data(table_key))))
    pool_shape = (spec.num_pages, spec.page_size, spec.num_kv_heads)

    def pool(key: jax.Array, num_channels: int) -> jax.Array:
        values = jax.random.normal(key, (*pool_shape, num_channels), spec.dtype)
        return jnp.where(is_read_NZ[:, :, None, None], values, jnp.nan)

    q_shape = (len(spec.committed_len), spec.num_rows, spec.num_q_heads, spec.k_channels)
    bits_BW = None
    if spec.tree_parents is not None:
        bits_BW = jnp.tile(ancestor_bits(spec.tree_parents), (len(spec.committed_len), 1))
    return PagedInputs(
        q_BWHC=jax.random.normal(q_key, q_shape, spec.dtype),
        k_pages_NZGC=pool(k_key, spec.k_channels),
        v_pages_NZGE=None if spec.is_latent else pool(v_key, spec.v_channels),
        page_table_BP=jnp.asarray(table_BP, jnp.int32),
        committed_len_B=jnp.asarray(spec.committed_len, jnp.int32),
        ancestor_bits_BW=bits_BW,
    )


def ancestor_bits(tree_parents: tuple[int, ...]) -> np.ndarray:
    """Bits of a tree's rows: each row's own, and its parent's bits.

    >>> [f"{bits:03b}" for bits in ancestor_bits((-1, 0, 0))]
    ['001', '011', '101']
    """
    bits: list[int] = []
    for row, parent in enumerate(tree_parents):
        bits.append(1 << row | (bits[parent] if parent >= 0 else 0))
    return np.array(bits, np.uint32)


def log_uniform_lengths(num_slots: int, shortest: int, longest: int, *, seed: int = 0) -> tuple[int, ...]:
    """Lengths whose logarithm is uniform: most are short, a few carry most of the bytes."""
    logs = np.random.default_rng(seed).uniform(np.log(shortest), np.log(longest), num_slots)
    return tuple(int(length) for length in np.exp(logs))


def _tables(spec: ArgSpec, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(page table [B, P], which positions of which pages are attended by some row [N, Z])."""
    ids = iter(rng.permutation(np.arange(1, spec.num_pages)).tolist())
    table_BP = np.zeros((len(spec.committed_len), spec.pages_per_slot), np.int64)
    is_read_NZ = np.zeros((spec.num_pages, spec.page_size), bool)
    for slot, length in enumerate(spec.committed_len):
        owned = [next(ids) for _ in range(spec.num_pages_of(length))]
        table_BP[slot, : len(owned)] = owned
        for position in range(length + spec.num_rows if length >= 0 else 0):
            is_read_NZ[owned[position // spec.page_size], position % spec.page_size] = True
    spare = next(ids)
    strays = (spare, -1, spec.num_pages + 5)
    for slot, length in enumerate(spec.committed_len):
        for entry in range(spec.num_pages_of(length), spec.pages_per_slot):
            table_BP[slot, entry] = strays[(slot + entry) % len(strays)]
    return table_BP, is_read_NZ


def _gqa(num_q_heads: int, num_kv_heads: int, channels: int) -> ArgSpec:
    return ArgSpec(num_q_heads, num_kv_heads, channels, channels, False, 16, 1, (0,), channels**-0.5)


def _mla(num_heads: int, latent: int, rotary: int, head_channels: int) -> ArgSpec:
    return ArgSpec(num_heads, 1, latent + rotary, latent, True, 16, 1, (0,), head_channels**-0.5)


_GQA_32_8 = _gqa(32, 8, 128)
_MQA_8 = _gqa(8, 1, 64)
_MLA_16 = _mla(16, 512, 64, 192)
_MLA_128 = _mla(128, 512, 64, 192)
_MLA_8 = _mla(8, 128, 64, 96)  # the bundled model's
_UNIFORM = (4096,) * 64
_RAGGED = log_uniform_lengths(64, 256, 16384)
_BINARY_TREE = (-1, 0, 0, 1, 1, 2, 2)
_BUSHY_TREE = (-1, 0, 0, 0, 0, 1, 1, 2)


def _edges(page_size: int, num_rows: int) -> tuple[int, ...]:
    """Empty, one, rows that end with a page, begin one, straddle two, and a dead slot."""
    return (0, 1, 2 * page_size - num_rows, 2 * page_size, 3 * page_size - 1, -1)


ARG_SPECS: dict[str, ArgSpec] = {
    # What a kernel must get right.
    "gqa_32_8_edges": replace(_GQA_32_8, num_rows=4, committed_len=_edges(16, 4)),
    "gqa_32_8_one_row_page_32": replace(_GQA_32_8, page_size=32, committed_len=_edges(32, 1)),
    "gqa_32_8_page_128": replace(_GQA_32_8, page_size=128, num_rows=8, committed_len=(0, 127, 120, 300)),
    "gqa_32_8_tree": replace(_GQA_32_8, num_rows=7, committed_len=_edges(16, 7), tree_parents=_BINARY_TREE),
    "mqa_8_edges": replace(_MQA_8, num_rows=3, committed_len=_edges(16, 3)),
    "mla_8_edges": replace(_MLA_8, num_rows=4, committed_len=_edges(16, 4)),
    "mla_8_one_row": replace(_MLA_8, committed_len=(200, 1023, 17)),
    "mla_8_tree": replace(_MLA_8, page_size=64, num_rows=8, committed_len=(130, 56, 0), tree_parents=_BUSHY_TREE),
    "mla_16_edges_page_64": replace(_MLA_16, page_size=64, num_rows=4, committed_len=_edges(64, 4)),
    "mla_16_tree": replace(_MLA_16, page_size=64, num_rows=8, committed_len=_edges(64, 8), tree_parents=_BUSHY_TREE),
    "mla_128_edges_page_64": replace(_MLA_128, page_size=64, num_rows=2, committed_len=_edges(64, 2)),
    # What it is timed at: gigabytes.
    "gqa_32_8_uniform": replace(_GQA_32_8, page_size=64, committed_len=_UNIFORM),
    "gqa_32_8_uniform_4_rows": replace(_GQA_32_8, page_size=64, num_rows=4, committed_len=_UNIFORM),
    "gqa_32_8_uniform_page_16": replace(_GQA_32_8, committed_len=_UNIFORM),
    "gqa_32_8_ragged": replace(_GQA_32_8, page_size=64, committed_len=_RAGGED),
    "gqa_32_8_ragged_4_rows": replace(_GQA_32_8, page_size=64, num_rows=4, committed_len=_RAGGED),
    "gqa_32_8_one_long": replace(_GQA_32_8, page_size=64, committed_len=(32768,)),
    "mla_16_uniform": replace(_MLA_16, page_size=64, committed_len=_UNIFORM),
    "mla_16_uniform_4_rows": replace(_MLA_16, page_size=64, num_rows=4, committed_len=_UNIFORM),
    "mla_16_uniform_page_16": replace(_MLA_16, committed_len=_UNIFORM),
    "mla_16_ragged_4_rows": replace(_MLA_16, page_size=64, num_rows=4, committed_len=_RAGGED),
    "mla_128_uniform": replace(_MLA_128, page_size=64, committed_len=_UNIFORM),
    "mla_128_uniform_4_rows": replace(_MLA_128, page_size=64, num_rows=4, committed_len=_UNIFORM),
    "mla_128_ragged": replace(_MLA_128, page_size=64, committed_len=_RAGGED),
}
"""Shapes by name. Those for checking have pools of a few megabytes (`kv_bytes`)."""
