"""The carry of an MTP proposer: hidden states and tokens of the last committed positions.

Row r of a slot is the pair at position `c - num_fresh + r`: the target's hidden state there and the token after it.
A step hands on the positions that became final (n of them) and the D - 1 before them: with D MTP layers in a row,
layer d's entry at position i needs token i + d, so its last d - 1 entries are provisional and are made again.
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int


@struct.dataclass
class Features:
    """`num_fresh` valid rows of F, left-aligned; what is past them means nothing."""

    hidden_BFD: Float[Array, "B F D"]
    tokens_BF: Int[Array, "B F"]
    num_fresh: Int[Array, " B"]


def empty_features(num_slots: int, num_rows: int, hidden_size: int, dtype: jnp.dtype) -> Features:
    """No rows in any slot.

    >>> empty_features(2, 3, 8, jnp.dtype("float32")).hidden_BFD.shape
    (2, 3, 8)
    """
    return Features(
        hidden_BFD=jnp.zeros((num_slots, num_rows, hidden_size), dtype),
        tokens_BF=jnp.zeros((num_slots, num_rows), jnp.int32),
        num_fresh=jnp.zeros((num_slots,), jnp.int32),
    )


def roll_features(
    old: Features,
    hidden_BWD: Float[Array, "B W D"],
    tokens_BW: Int[Array, "B W"],
    num_new: Int[Array, " B"],
    keep: Int[Array, " B"],
) -> Features:
    """The last `keep` rows (fewer if there are not so many) of the old rows followed by `num_new` new ones.

    >>> old = Features(jnp.array([[[1.], [2.], [0.]]]), jnp.array([[11, 12, 0]]), jnp.array([2]))
    >>> new = roll_features(old, jnp.array([[[3.], [4.]]]), jnp.array([[13, 14]]), jnp.array([1]), jnp.array([2]))
    >>> new.tokens_BF[0, :2].tolist(), new.num_fresh.tolist()
    ([12, 13], [2])
    """
    total = old.num_fresh + num_new
    kept = jnp.minimum(total, keep)
    rows = jnp.arange(old.tokens_BF.shape[1], dtype=jnp.int32)[None, :]
    source_BF = (total - kept)[:, None] + rows
    is_old_BF = source_BF < old.num_fresh[:, None]
    from_old = jnp.where(is_old_BF, source_BF, 0)
    from_new = jnp.clip(source_BF - old.num_fresh[:, None], 0, tokens_BW.shape[1] - 1)
    tokens_BF = jnp.where(is_old_BF, _rows(old.tokens_BF, from_old), _rows(tokens_BW, from_new))
    hidden_BFD = jnp.where(
        is_old_BF[..., None], _rows(old.hidden_BFD, from_old), _rows(hidden_BWD.astype(old.hidden_BFD.dtype), from_new)
    )
    return Features(hidden_BFD=hidden_BFD, tokens_BF=tokens_BF, num_fresh=kept)


def select_slots(is_new_B: Bool[Array, " B"], new: Features, old: Features) -> Features:
    """`new` where the mask says so, `old` elsewhere."""
    return Features(
        hidden_BFD=jnp.where(is_new_B[:, None, None], new.hidden_BFD, old.hidden_BFD),
        tokens_BF=jnp.where(is_new_B[:, None], new.tokens_BF, old.tokens_BF),
        num_fresh=jnp.where(is_new_B, new.num_fresh, old.num_fresh),
    )


def _rows(x: Array, index_BF: Int[Array, "B F"]) -> Array:
    index = index_BF.reshape(*index_BF.shape, *(1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1)
