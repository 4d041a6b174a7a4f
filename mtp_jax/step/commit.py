"""The state change of a step: how many tokens a slot really gained, and what it carries on."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mtp_jax.core.types import Accepted, Drafts, Logprobs, SlotView, StepOutputs


def count_emitted(accepted: Accepted, slots: SlotView) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """(num_emitted n, finished) of each slot.

    n = min(num_accepted + 1, limit - committed_len), cut after the first stop token; 0 for a slot that is not live.
    Example: limit 20, committed_len 18, 3 drafts accepted -> n = 2 and the slot is finished: the second token is its
    last, and needs no KV.
    """
    room = slots.limit - slots.committed_len
    num_valid = jnp.minimum(accepted.num_accepted + 1, room)
    is_stop_BE = jnp.any(accepted.tokens_BE[:, :, None] == slots.stop_ids_BI[:, None, :], axis=-1)
    num_columns = accepted.tokens_BE.shape[1]
    column = jnp.arange(num_columns, dtype=jnp.int32)[None, :]
    up_to_stop = jnp.min(jnp.where(is_stop_BE, column + 1, num_columns + 1), axis=1)
    num_emitted = jnp.where(slots.live, jnp.minimum(num_valid, up_to_stop), 0)
    is_stopped = slots.live & (up_to_stop <= num_valid)
    is_full = slots.live & (slots.committed_len + num_emitted >= slots.limit)
    return num_emitted, is_stopped | is_full


def last_emitted(accepted: Accepted, num_emitted: Int[Array, " B"], pending: Int[Array, " B"]) -> Int[Array, " B"]:
    """The new pending token: the last emitted one, or the old one where nothing was emitted."""
    last = jnp.take_along_axis(accepted.tokens_BE, jnp.maximum(num_emitted - 1, 0)[:, None], axis=1)[:, 0]
    return jnp.where(num_emitted > 0, last, pending)


def step_outputs(
    accepted: Accepted,
    drafts: Drafts,
    slots: SlotView,
    num_emitted: Int[Array, " B"],
    finished: Bool[Array, " B"],
    logprobs: Logprobs,
) -> StepOutputs:
    """What the host will read. Accepted drafts are counted among the emitted tokens only."""
    return StepOutputs(
        tokens_BE=accepted.tokens_BE,
        num_emitted=num_emitted,
        num_accepted=jnp.minimum(accepted.num_accepted, num_emitted),
        num_drafted=slots.draft_cap,
        committed_len=slots.committed_len + num_emitted,
        finished=finished,
        drafts_BK=drafts.tokens_BK,
        target_tokens_BW=accepted.target_tokens_BW,
        logprobs=logprobs,
    )
