"""One decode step, the four verbs in one call: draft, verify, accept, commit."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Int

from mtp_jax.core.shapes import StepShape
from mtp_jax.core.topology import CHAIN, Topology
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
from mtp_jax.models.bound import BoundModel, Rows, TreeRows
from mtp_jax.ops.kv_cache import compact_kv, row_positions
from mtp_jax.ops.logprobs import token_logprobs
from mtp_jax.ops.penalties import token_facts
from mtp_jax.ops.sampling import target_noise
from mtp_jax.ops.trees import ancestor_bits, depths, rows_of_path
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
    slots = view_slots(state, inputs, shape, program.family.vocab_size, program.topology)
    model = program.bind(weights)

    carry = slot_prefix(state.carry, shape.slots)
    drafts, carry, draft_kv = program.proposer.propose(model, carry, state.draft_kv, slots, draft_len=shape.draft_len)
    if drafts.num_proposed is not None:
        slots = replace(slots, draft_cap=jnp.minimum(slots.draft_cap, drafts.num_proposed))
    verified, kv = verify(model, state.kv, slots, drafts)
    accepted = program.rule.accept(drafts, verified.logits_BWV, slots, program.parallel)

    num_emitted, finished = count_emitted(accepted, slots)
    path_BE = accepted.path_BE
    if path_BE is not None:
        kv = compact_kv(kv, slots.page_table_BP, slots.committed_len, path_BE, num_emitted)
    features_BEJ = rows_of_path(verified.features_BWJ, path_BE)
    carry = program.proposer.observe(carry, features_BEJ, accepted.tokens_BE, num_emitted)
    logprobs = token_logprobs(
        verified.logits_BWV, accepted.tokens_BE, slots.sampling, program.max_logprobs, program.parallel, path_BE
    )
    outputs = step_outputs(accepted, drafts, slots, num_emitted, finished, logprobs)
    new_state = DecodeState(
        kv=kv,
        draft_kv=draft_kv,
        committed_len=with_slot_prefix(state.committed_len, outputs.committed_len),
        history_BS=with_tokens(state.history_BS, slots.committed_len + 1, accepted.tokens_BE, num_emitted),
        pending_token=with_slot_prefix(state.pending_token, last_emitted(accepted, num_emitted, slots.pending_token)),
        lists=state.lists,
        finished=with_slot_prefix(state.finished, state.finished[: shape.slots] | finished),
        carry=with_slot_prefix(state.carry, carry),
    )
    return new_state, outputs


def view_slots(
    state: DecodeState, inputs: StepInputs, shape: StepShape, vocab_size: int, topology: Topology = CHAIN
) -> SlotView:
    """The bucket's slots: what the host asked for, cut to what the device knows.

    The host's cap comes from bounds; the device's own rule is exact: a slot with r = limit - committed_len tokens to go
    drafts at most r - 1, so its last token costs no draft and no write passes the limit. A tree keeps its first nodes.
    """
    committed_len = state.committed_len[: shape.slots]
    live = inputs.live & ~state.finished[: shape.slots]
    room = jnp.maximum(inputs.limit - committed_len, 1)
    cap = jnp.minimum(jnp.minimum(inputs.draft_cap, topology.num_drafts(shape.draft_len)), room - 1)
    history_BS = state.history_BS[: shape.slots]
    sampling = replace(inputs.sampling, lists=slot_prefix(state.lists, shape.slots))
    return SlotView(
        committed_len=committed_len,
        pending_token=state.pending_token[: shape.slots],
        live=live,
        draft_cap=jnp.where(live, cap, 0),
        num_positions=jnp.where(live, jnp.minimum(_num_reserved(inputs.draft_cap, shape.draft_len, topology), room), 0),
        limit=inputs.limit,
        page_table_BP=inputs.page_table_BP,
        history_BS=history_BS,
        sampling=sampling,
        noise_BWV=target_noise(sampling, row_positions(committed_len + 1, shape.draft_len + 1), vocab_size),
        facts=token_facts(sampling, history_BS, committed_len + 1, vocab_size),
    )


def _num_reserved(host_cap: Int[Array, " B"], draft_len: int, topology: Topology) -> Int[Array, " B"]:
    """What the host reserved with its cap: `Topology.num_positions`, told for a whole step and for a cut one."""
    num_drafts = topology.num_drafts(draft_len)
    return jnp.where(host_cap >= num_drafts, topology.num_positions(draft_len, num_drafts), host_cap + 1)


def verify(
    model: BoundModel, kv: tuple[LayerKV, ...], slots: SlotView, drafts: Drafts
) -> tuple[Verified, tuple[LayerKV, ...]]:
    """The target over pending + drafts: W = K + 1 rows, stored at c..c+K; rows past a slot's cap write nowhere.

    In a tree a row's position is c + its depth, and it attends its ancestors alone.
    """
    tokens_BW = jnp.concatenate([slots.pending_token[:, None], drafts.tokens_BK], axis=1)
    within_cap_BW = jnp.arange(tokens_BW.shape[1])[None, :] <= slots.draft_cap[:, None]
    rows = Rows(
        base_len=jnp.where(slots.live, slots.committed_len, 0),
        live=slots.live,
        may_write_BW=within_cap_BW,
        page_table_BP=slots.page_table_BP,
        tree=None if drafts.parent_BK is None else _tree_rows(drafts.parent_BK),
    )
    hidden_BWD, features_BWJ, kv = model.target(tokens_BW, rows, kv)
    return Verified(features_BWJ=features_BWJ, logits_BWV=model.unembed(hidden_BWD)), kv


def _tree_rows(parent_BK: Int[Array, "B K"]) -> TreeRows:
    bits_BW = ancestor_bits(parent_BK)
    return TreeRows(depth_BW=depths(bits_BW), ancestor_bits_BW=bits_BW)
