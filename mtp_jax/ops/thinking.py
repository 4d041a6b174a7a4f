"""Whether a text is inside its thinking part, from its tokens alone."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mtp_jax.core.types import RowText


def is_thinking(text: RowText, begin_end_B2: Int[Array, "B 2"]) -> Bool[Array, "B W"]:
    """Whether the last of a slot's two marks before each row, drafts of the launch included, is the first of them.

    Never with `NO_TOKEN` marks, or where the text has neither. Since nothing but the text is asked, chunks of a prompt,
    preemption and drafts that fell leave no trace.

    >>> history, drafts = jnp.array([[1, 5, 5, 0]]), jnp.array([[5, 2]])  # 1 begins, 2 ends
    >>> is_before = jnp.array([[[False, False], [True, False], [True, True]]])
    >>> text = RowText(history, jnp.array([3]), drafts, is_before, facts=None)
    >>> is_thinking(text, jnp.array([[1, 2]])).tolist()
    [[True, True, False]]
    """
    num_drafts, capacity = text.drafts_BK.shape[1], text.history_BS.shape[1]
    place_1S = jnp.arange(capacity, dtype=jnp.int32)[None, :]
    place_11K = jnp.arange(capacity, capacity + num_drafts, dtype=jnp.int32)[None, None, :]

    def last_place(mark_B: Array) -> Array:
        """Where the mark stands last before each row; -1: nowhere."""
        is_mark_BS = (text.history_BS == mark_B[:, None]) & (place_1S < text.num_known[:, None])
        in_history_B = jnp.max(jnp.where(is_mark_BS, place_1S, -1), axis=1)
        is_mark_BWK = text.is_before_BWK & (text.drafts_BK == mark_B[:, None])[:, None, :]
        in_drafts_BW = jnp.max(jnp.where(is_mark_BWK, place_11K, -1), axis=2, initial=-1)
        return jnp.maximum(in_history_B[:, None], in_drafts_BW)

    return last_place(begin_end_B2[:, 0]) > last_place(begin_end_B2[:, 1])
