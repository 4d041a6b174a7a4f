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


def within_cap(draft_cap_B: Int[Array, " B"], num_drafts: int) -> Bool[Array, "B K"]:
    """Which of a slot's drafts are there.

    >>> within_cap(jnp.array([1, 3]), 3).tolist()
    [[True, False, False], [True, True, True]]
    """
    return jnp.arange(num_drafts)[None, :] < draft_cap_B[:, None]


def accepted_prefix_len(stands_BK: Bool[Array, "B K"], draft_cap_B: Int[Array, " B"]) -> Int[Array, " B"]:
    """How many drafts stand before the first that does not, or that is not there.

    >>> stands = jnp.array([[True, True, False, True], [True, True, True, True]])
    >>> accepted_prefix_len(stands, jnp.array([4, 3])).tolist()
    [2, 3]
    """
    is_prefix_BK = stands_BK & within_cap(draft_cap_B, stands_BK.shape[1])
    return is_prefix_BK.astype("int32").cumprod(axis=1).sum(axis=1)


def target_after_prefix(
    drafts: Drafts, stands_BK: Bool[Array, "B K"], draft_cap_B: Int[Array, " B"], target_tokens_BW: Int[Array, "B W"]
) -> Accepted:
    """The verdict where drafts stand that the target need not say: their prefix, then the target's own token.

    >>> drafts, stands = Drafts(jnp.array([[5, 6]])), jnp.array([[True, False]])
    >>> verdict = target_after_prefix(drafts, stands, jnp.array([2]), jnp.array([[1, 2, 3]]))
    >>> verdict.num_accepted.tolist(), verdict.tokens_BE[0, :2].tolist()
    ([1], [5, 2])
    """
    num_accepted = accepted_prefix_len(stands_BK, draft_cap_B)
    next_token_B1 = jnp.take_along_axis(target_tokens_BW, num_accepted[:, None], axis=1)
    return Accepted(
        num_accepted=num_accepted,
        tokens_BE=drafts_then(drafts, num_accepted, next_token_B1),
        target_tokens_BW=target_tokens_BW,
    )


def drafts_then(drafts: Drafts, num_accepted: Int[Array, " B"], next_token_B1: Int[Array, "B 1"]) -> Int[Array, "B E"]:
    """`Accepted.tokens_BE` of a rule that lets drafts stand: the accepted ones, then the token that follows them.

    >>> drafts = Drafts(jnp.array([[5, 6, 7], [5, 6, 7]]))
    >>> drafts_then(drafts, jnp.array([1, 3]), jnp.array([[9], [8]])).tolist()
    [[5, 9, 9, 9], [5, 6, 7, 8]]
    """
    column_1E = jnp.arange(drafts.tokens_BK.shape[1] + 1)[None, :]
    padded_BE = jnp.concatenate([drafts.tokens_BK, next_token_B1], axis=1)
    return jnp.where(column_1E < num_accepted[:, None], padded_BE, next_token_B1)
