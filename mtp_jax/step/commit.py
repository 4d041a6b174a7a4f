"""The state change of a step: how many tokens a slot really gained, and what it carries on."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mtp_jax.core.types import Accepted, Drafts, Logprobs, SlotView, StepOutputs
from mtp_jax.ops.trees import ancestor_bits, depths


def count_emitted(accepted: Accepted, slots: SlotView) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """(num_emitted n, finished) of each slot.

    n = min(num_accepted + 1, limit - committed_len), cut after the first stop token; 0 for a slot that is not live.
    Example: limit 20, committed_len 18, 3 drafts accepted -> n = 2 and the slot is finished: the second token is its
    last, and needs no KV.
    """
    room = slots.limit - slots.committed_len
    num_valid = jnp.minimum(accepted.num_accepted + 1, room)
    rows = slots.sampling
    ends_text_BI = jnp.arange(rows.stop_ids_BI.shape[1])[None, :] < rows.num_stop_ids_B[:, None]
    is_stop_id_BEI = (accepted.tokens_BE[:, :, None] == rows.stop_ids_BI[:, None, :]) & ends_text_BI[:, None, :]
    is_stop_BE = jnp.any(is_stop_id_BEI, axis=-1)
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


def with_tokens(
    history_BS: Int[Array, "B S"],
    start_C: Int[Array, " C"],
    tokens_CT: Int[Array, "C T"],
    num_tokens_C: Int[Array, " C"],
    slot_C: Int[Array, " C"] | None = None,
) -> Int[Array, "B S"]:
    """The history with the first `num_tokens_C` tokens of each row written from position `start_C` on.

    Row i is of slot i unless `slot_C` says; a row without tokens, or of a slot that does not exist, writes nothing.

    >>> history = jnp.array([[5, 0, 0, 0], [6, 7, 0, 0]])
    >>> with_tokens(history, jnp.array([1, 2]), jnp.array([[8, 9], [8, 9]]), jnp.array([2, 1])).tolist()
    [[5, 8, 9, 0], [6, 7, 8, 0]]
    """
    slot_C = jnp.arange(tokens_CT.shape[0]) if slot_C is None else slot_C
    column_1T = jnp.arange(tokens_CT.shape[1], dtype=jnp.int32)[None, :]
    nowhere = history_BS.shape[1]
    position_CT = jnp.where(column_1T < num_tokens_C[:, None], start_C[:, None] + column_1T, nowhere)
    return history_BS.at[slot_C[:, None], position_CT].set(tokens_CT, mode="drop")


def step_outputs(
    accepted: Accepted,
    drafts: Drafts,
    slots: SlotView,
    num_emitted: Int[Array, " B"],
    finished: Bool[Array, " B"],
    logprobs: Logprobs | None,
) -> StepOutputs:
    """What the host will read. Accepted drafts are counted among the emitted tokens only."""
    return StepOutputs(
        tokens_BE=accepted.tokens_BE,
        num_emitted=num_emitted,
        num_accepted=jnp.minimum(accepted.num_accepted, num_emitted),
        num_drafted=slots.draft_cap,
        draft_depth=_depth_within_cap(drafts, slots.draft_cap),
        committed_len=slots.committed_len + num_emitted,
        finished=finished,
        drafts_BK=drafts.tokens_BK,
        target_tokens_BW=accepted.target_tokens_BW,
        logprobs=logprobs,
        parent_BK=drafts.parent_BK,
    )


def _depth_within_cap(drafts: Drafts, draft_cap: Int[Array, " B"]) -> Int[Array, " B"]:
    if drafts.parent_BK is None:
        return draft_cap
    depth_BW = depths(ancestor_bits(drafts.parent_BK))
    is_there_BW = jnp.arange(depth_BW.shape[1])[None, :] <= draft_cap[:, None]
    return jnp.max(jnp.where(is_there_BW, depth_BW, 0), axis=1)
