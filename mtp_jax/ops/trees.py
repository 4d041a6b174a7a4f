"""Draft trees on the device: from the parents of the drafts to ancestors, depths and paths of rows.

Row 0 is the pending token, row k + 1 draft k. A row's bits are those of the rows on the way to it, its own included:
what attention takes as ancestor bits. Parents come before children, so the rows of a path ascend.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped, UInt32

_DOUBLINGS = 5  # of 32 rows at most, none is more than 31 generations away


def ancestor_bits(parent_BK: Int[Array, "B K"]) -> UInt32[Array, "B W"]:
    """Of each of the W = K + 1 rows, at most 32: bit v is set if row v is on its path.

    >>> [f"{bits:03b}" for bits in ancestor_bits(jnp.array([[0, 0]]))[0].tolist()]
    ['001', '011', '101']
    """
    num_rows = parent_BK.shape[1] + 1
    bits_BW = jnp.broadcast_to(row_bit(jnp.arange(num_rows)), (parent_BK.shape[0], num_rows))
    # An ancestor 2^i generations up already knows those that are 2^i further up.
    ancestor_BW = jnp.pad(parent_BK, ((0, 0), (1, 0)))
    for _ in range(_DOUBLINGS):
        bits_BW = bits_BW | jnp.take_along_axis(bits_BW, ancestor_BW, axis=1)
        ancestor_BW = jnp.take_along_axis(ancestor_BW, ancestor_BW, axis=1)
    return bits_BW


def row_bit(row: Int[Array, "*x"]) -> UInt32[Array, "*x"]:
    """The bit that speaks of the row.

    >>> row_bit(jnp.arange(3)).tolist()
    [1, 2, 4]
    """
    return jnp.uint32(1) << row.astype(jnp.uint32)


def depths(bits_BW: UInt32[Array, "B W"]) -> Int[Array, "B W"]:
    """Of each row, how many drafts lead to it, its own included: its position is committed_len + depth.

    >>> depths(ancestor_bits(jnp.array([[0, 0, 2]]))).tolist()
    [[0, 1, 1, 2]]
    """
    return lax.population_count(bits_BW).astype(jnp.int32) - 1


def is_ancestor(bits_BW: UInt32[Array, "B W"], num_rows: int) -> Bool[Array, "B W V"]:
    """The bits, spread out: whether row v < `num_rows` is on the path of row w.

    >>> is_ancestor(ancestor_bits(jnp.array([[0, 0]])), 3).astype(int)[0].tolist()
    [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    row_11V = jnp.arange(num_rows, dtype=jnp.uint32)[None, None, :]
    return ((bits_BW[..., None] >> row_11V) & 1) == 1


def path_to(bits_BW: UInt32[Array, "B W"], row: Int[Array, " B"], num_rows: int) -> Int[Array, "B E"]:
    """The rows that lead to `row`, row 0 first, the row itself at the place of its depth; 0 in what is left of E.

    >>> path_to(ancestor_bits(jnp.array([[0, 0, 2]])), jnp.array([3]), 4).tolist()
    [[0, 2, 3, 0]]
    """
    depth_BW = depths(bits_BW)
    bits_B1 = jnp.take_along_axis(bits_BW, row[:, None], axis=1)
    is_on_path_BW = is_ancestor(bits_B1, bits_BW.shape[1])[:, 0]
    place_11E = jnp.arange(num_rows, dtype=jnp.int32)[None, None, :]
    is_here_BWE = is_on_path_BW[..., None] & (depth_BW[..., None] == place_11E)
    row_1W1 = jnp.arange(bits_BW.shape[1], dtype=jnp.int32)[None, :, None]
    return jnp.sum(jnp.where(is_here_BWE, row_1W1, 0), axis=1, dtype=jnp.int32)


def rows_of_path(rows_BWx: Shaped[Array, "B W *x"], path_BE: Int[Array, "B E"] | None) -> Shaped[Array, "B E *x"]:
    """What is known of each row, for the rows of the path alone; all of it where there is no path (a chain).

    >>> rows_of_path(jnp.array([[10, 11, 12]]), jnp.array([[0, 2]])).tolist()
    [[10, 12]]
    """
    if path_BE is None:
        return rows_BWx
    return jnp.take_along_axis(rows_BWx, path_BE.reshape(*path_BE.shape, *(1,) * (rows_BWx.ndim - 2)), axis=1)
