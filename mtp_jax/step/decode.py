"""One decode step, the four verbs in one call: draft, verify, accept, commit."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Int

from mtp_jax.core.shapes import StepShape
from mtp_jax.core.types import (
    DecodeState,
    Drafts,
    LayerKV,
    Needs,
    SlotView,
    StepInputs,
    StepOutputs,
    Verified,
    slot_prefix,
    with_slot_prefix,
)
from mtp_jax.models.api import Weights
from mtp_jax.models.bound import BoundModel, Rows
from mtp_jax.ops.kv_cache import row_positions
from mtp_jax.ops.sampling import target_noise, token_logprobs
from mtp_jax.step.commit import count_emitted, last_emitted, step_outputs, with_tokens
from mtp_jax.step.program import StepProgram


def decode_step(
    weights: Weights,
    state: DecodeState,
    packed_BX: Int[Array, "B X"],
    *,
    program: StepProgram,
    shape: StepShape,
    agreed: Needs | None = None,
) -> tuple[DecodeState, StepOutputs]:
    """Every slot of the bucket gains 1..K+1 tokens (0 where not live).

    `state` is donated. `packed_BX` is one upload of `core.layout` columns for the bucket's slots. Nothing about a
    proposal outlives the call: drafts are made first and verified at once, so a step's draft length binds both.
    `agreed`: what the slots of all data shards need, where there are several.
    """
    inputs = StepInputs.unpack(packed_BX, num_stop_ids=program.num_stop_ids, agreed=agreed)
    slots = view_slots(state, inputs, shape, program.family.vocab_size)
    model = program.bind(weights)

    carry = slot_prefix(state.carry, shape.slots)
    drafts, carry, draft_kv = program.proposer.propose(model, carry, state.draft_kv, slots, draft_len=shape.draft_len)
    if drafts.num_proposed is not None:
        slots = replace(slots, draft_cap=jnp.minimum(slots.draft_cap, drafts.num_proposed))
    verified, kv = verify(model, state.kv, slots, drafts)
    accepted = program.rule.accept(drafts, verified.logits_BWV, slots, program.parallel)

    num_emitted, finished = count_emitted(accepted, slots)
    carry = program.proposer.observe(carry, verified.features_BWJ, accepted.tokens_BE, num_emitted)
    logprobs = token_logprobs(
        verified.logits_BWV, accepted.tokens_BE, slots.sampling, program.max_logprobs, program.parallel
    )
    outputs = step_outputs(accepted, drafts, slots, num_emitted, finished, logprobs)
    new_state = DecodeState(
        kv=kv,
        draft_kv=draft_kv,
        committed_len=with_slot_prefix(state.committed_len, outputs.committed_len),
        history_BS=with_tokens(state.history_BS, slots.committed_len + 1, accepted.tokens_BE, num_emitted),
        pending_token=with_slot_prefix(state.pending_token, last_emitted(accepted, num_emitted, slots.pending_token)),
        finished=with_slot_prefix(state.finished, state.finished[: shape.slots] | finished),
        carry=with_slot_prefix(state.carry, carry),
    )
    return new_state, outputs


def view_slots(state: DecodeState, inputs: StepInputs, shape: StepShape, vocab_size: int) -> SlotView:
    """The bucket's slots: what the host asked for, cut to what the device knows.

    The host's cap comes from bounds; the device's own rule is exact: a slot with r = limit - committed_len tokens to go
    drafts at most r - 1, so its last token costs no draft and no write passes the limit.
    """
    committed_len = state.committed_len[: shape.slots]
    live = inputs.live & ~state.finished[: shape.slots]
    room_for_drafts = jnp.maximum(inputs.limit - committed_len - 1, 0)
    cap = jnp.minimum(jnp.minimum(inputs.draft_cap, shape.draft_len), room_for_drafts)
    return SlotView(
        committed_len=committed_len,
        pending_token=state.pending_token[: shape.slots],
        live=live,
        draft_cap=jnp.where(live, cap, 0),
        limit=inputs.limit,
        page_table_BP=inputs.page_table_BP,
        stop_ids_BI=inputs.stop_ids_BI,
        history_BS=state.history_BS[: shape.slots],
        sampling=inputs.sampling,
        noise_BWV=target_noise(inputs.sampling, row_positions(committed_len + 1, shape.draft_len + 1), vocab_size),
    )


def verify(
    model: BoundModel, kv: tuple[LayerKV, ...], slots: SlotView, drafts: Drafts
) -> tuple[Verified, tuple[LayerKV, ...]]:
    """The target over pending + drafts: W = K + 1 rows at positions c..c+K; rows past a slot's cap write nowhere."""
    tokens_BW = jnp.concatenate([slots.pending_token[:, None], drafts.tokens_BK], axis=1)
    within_cap_BW = jnp.arange(tokens_BW.shape[1])[None, :] <= slots.draft_cap[:, None]
    rows = Rows(
        base_len=jnp.where(slots.live, slots.committed_len, 0),
        live=slots.live,
        may_write_BW=within_cap_BW,
        page_table_BP=slots.page_table_BP,
    )
    hidden_BWD, features_BWJ, kv = model.target(tokens_BW, rows, kv)
    return Verified(features_BWJ=features_BWJ, logits_BWV=model.unembed(hidden_BWD)), kv
