"""What an acceptance rule must provide: which drafts stand, and which token follows them."""

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.core.types import Accepted, Drafts, SlotView
from mtp_jax.ops.sharding import Parallel


@runtime_checkable
class AcceptanceRule(Protocol):
    """Implementations are frozen, hashable dataclasses."""

    @property
    def takes_trees(self) -> bool:
        """Whether drafts may be trees (`Drafts.parent_BK`)."""
        ...

    def accept(
        self, drafts: Drafts, target_logits_BWV: Float[Array, "B W v"], slots: SlotView, parallel: Parallel
    ) -> Accepted:
        """The verdict of one step. Row w of the logits speaks of the token after row w: see `Verified`.

        Of a slot only the first `slots.draft_cap` drafts are there; the others mean nothing.
        """
        ...


def accepted_prefix_len(is_right_BK: Bool[Array, "B K"]) -> Int[Array, " B"]:
    """Length of the longest all-true prefix of each row.

    >>> import jax.numpy as jnp
    >>> accepted_prefix_len(jnp.array([[True, True, False, True], [False, True, True, True]])).tolist()
    [2, 0]
    """
    return is_right_BK.astype("int32").cumprod(axis=1).sum(axis=1)


def drafts_then(drafts: Drafts, num_accepted: Int[Array, " B"], next_token_B1: Int[Array, "B 1"]) -> Int[Array, "B E"]:
    """`Accepted.tokens_BE` of a rule that lets drafts stand: the accepted ones, then the token that follows them.

    >>> drafts = Drafts(jnp.array([[5, 6, 7], [5, 6, 7]]))
    >>> drafts_then(drafts, jnp.array([1, 3]), jnp.array([[9], [8]])).tolist()
    [[5, 9, 9, 9], [5, 6, 7, 8]]
    """
    column_1E = jnp.arange(drafts.tokens_BK.shape[1] + 1)[None, :]
    padded_BE = jnp.concatenate([drafts.tokens_BK, next_token_B1], axis=1)
    return jnp.where(column_1E < num_accepted[:, None], padded_BE, next_token_B1)
