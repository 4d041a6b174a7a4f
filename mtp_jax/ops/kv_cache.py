"""Writing keys and values into pages. Masked writes go to the null page: never to a clamped or dropped index."""

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.paged_attention import BACKENDS
from mtp_jax.core.layout import NULL_PAGE as NULL_PAGE
from mtp_jax.core.types import KVSpec, LayerKV


def stored_specs(specs: Sequence[KVSpec], backend: str) -> tuple[KVSpec, ...]:
    """The specs with as many channels as the attention backend wants its pools to have; those added stay zero.

    >>> stored_specs([KVSpec(num_kv_heads=1, k_channels=192, v_channels=None, axis=None)], "mosaic_tpu")[0].k_channels
    256
    """
    multiple = BACKENDS[backend].channel_multiple

    def stored(channels: int) -> int:
        return -(-channels // multiple) * multiple

    return tuple(
        replace(
            spec,
            k_channels=stored(spec.k_channels),
            v_channels=None if spec.v_channels is None else stored(spec.v_channels),
        )
        for spec in specs
    )


def widen(rows_BWGC: Float[Array, "B W G C"], num_channels: int) -> Float[Array, "B W G X"]:
    """The rows with zero channels behind their own."""
    missing = num_channels - rows_BWGC.shape[-1]
    return jnp.pad(rows_BWGC, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else rows_BWGC


def init_kv(
    specs: Sequence[KVSpec], *, num_pages: int, page_size: int, dtype: jnp.dtype, num_shards: int = 1
) -> tuple[LayerKV, ...]:
    """Empty page pools, one per layer: in each data shard `num_pages` usable pages behind a null page of its own."""

    def pool(num_heads: int, channels: int) -> Array:
        return jnp.zeros((num_shards * (num_pages + 1), page_size, num_heads, channels), dtype)

    return tuple(
        LayerKV(
            k_pages=pool(spec.num_kv_heads, spec.k_channels),
            v_pages=None if spec.v_channels is None else pool(spec.num_kv_heads, spec.v_channels),
        )
        for spec in specs
    )


def row_positions(base_len_B: Int[Array, " B"], num_rows: int) -> Int[Array, "B W"]:
    """Positions of `num_rows` rows that start at each slot's base.

    >>> row_positions(jnp.array([5, 0]), 3).tolist()
    [[5, 6, 7], [0, 1, 2]]
    """
    return base_len_B[:, None] + jnp.arange(num_rows, dtype=base_len_B.dtype)[None, :]


def page_addresses(
    positions_BW: Int[Array, "B W"],
    page_table_BP: Int[Array, "B P"],
    may_write_BW: Bool[Array, "B W"],
    page_size: int,
) -> tuple[Int[Array, "B W"], Int[Array, "B W"]]:
    """(page id, offset) of each position; the null page where writing is not allowed or the table ends.

    Rows of the null page keep their offsets: were they all at one address, a GPU would write them one after the other.

    >>> table = jnp.array([[7, 9]])
    >>> ids, offsets = page_addresses(jnp.array([[3, 4, 9]]), table, jnp.ones((1, 3), bool), page_size=4)
    >>> ids.tolist(), offsets.tolist()
    ([[7, 9, 0]], [[3, 0, 1]])
    """
    entry_BW = positions_BW // page_size
    inside_BW = may_write_BW & (positions_BW >= 0) & (entry_BW < page_table_BP.shape[1])
    ids_BW = jnp.take_along_axis(page_table_BP, jnp.where(inside_BW, entry_BW, 0), axis=1)
    return jnp.where(inside_BW, ids_BW, NULL_PAGE), positions_BW % page_size


def write_kv(
    layer_kv: LayerKV,
    k_BWGC: Float[Array, "B W G C"],
    v_BWGE: Float[Array, "B W G E"] | None,
    addresses: tuple[Int[Array, "B W"], Int[Array, "B W"]],
) -> LayerKV:
    """The pool with the rows' keys and values at `addresses` (from `page_addresses`)."""
    k_pages = _set_rows(layer_kv.k_pages, k_BWGC, addresses)
    if v_BWGE is None or layer_kv.v_pages is None:
        return LayerKV(k_pages=k_pages, v_pages=layer_kv.v_pages)
    return LayerKV(k_pages=k_pages, v_pages=_set_rows(layer_kv.v_pages, v_BWGE, addresses))


def compact_kv(
    kv: Sequence[LayerKV],
    page_table_BP: Int[Array, "B P"],
    base_len: Int[Array, " B"],
    path_BE: Int[Array, "B E"],
    num_rows: Int[Array, " B"],
) -> tuple[LayerKV, ...]:
    """The pools with the first `num_rows` rows of each path side by side: row path[e] moves to position base + e.

    Rows of a path ascend, so none moves forward, and all are read before any is written. Nothing else is touched.
    """
    place_1E = jnp.arange(path_BE.shape[1], dtype=jnp.int32)[None, :]
    moves_BE = (place_1E < num_rows[:, None]) & (path_BE != place_1E)
    page_size = kv[0].k_pages.shape[1]
    source = page_addresses(base_len[:, None] + path_BE, page_table_BP, moves_BE, page_size)
    target = page_addresses(base_len[:, None] + place_1E, page_table_BP, moves_BE, page_size)
    return tuple(
        write_kv(layer, layer.k_pages[source], None if layer.v_pages is None else layer.v_pages[source], target)
        for layer in kv
    )


def _set_rows(
    pages_NZGC: Float[Array, "N Z G C"],
    rows_BWGC: Float[Array, "B W G C"],
    addresses: tuple[Int[Array, "B W"], Int[Array, "B W"]],
) -> Float[Array, "N Z G C"]:
    """The pool with the rows in place; updated, not copied, where the step donates it."""
    if rows_BWGC.shape[:2] == (1, 1):
        # XLA makes a dynamic-update-slice of a scatter of one row, and copies the whole pool before it on a CPU. The
        # same row twice stays a scatter, which works in place.
        rows_BWGC = jnp.repeat(rows_BWGC, 2, axis=1)
        addresses = (jnp.repeat(addresses[0], 2, axis=1), jnp.repeat(addresses[1], 2, axis=1))
    return pages_NZGC.at[addresses].set(rows_BWGC.astype(pages_NZGC.dtype), mode="drop")
