"""What an acceptance rule must provide: which drafts stand, and which token follows them."""

from typing import Protocol, runtime_checkable

from jaxtyping import Array, Bool, Float, Int

from mtp_jax.core.types import Accepted, Drafts, SlotView
from mtp_jax.ops.sharding import Parallel


@runtime_checkable
class AcceptanceRule(Protocol):
    """Implementations are frozen, hashable dataclasses."""

    def accept(
        self, drafts: Drafts, target_logits_BWV: Float[Array, "B W v"], slots: SlotView, parallel: Parallel
    ) -> Accepted:
        """The verdict of one step. Row w of the logits speaks of the token at position committed_len + w + 1.

        At most `slots.draft_cap` drafts of a slot are accepted.
        """
        ...


def accepted_prefix_len(is_right_BK: Bool[Array, "B K"]) -> Int[Array, " B"]:
    """Length of the longest all-true prefix of each row.

    >>> import jax.numpy as jnp
    >>> accepted_prefix_len(jnp.array([[True, True, False, True], [False, True, True, True]])).tolist()
    [2, 0]
    """
    return is_right_BK.astype("int32").cumprod(axis=1).sum(axis=1)
