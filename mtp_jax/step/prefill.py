"""One prompt chunk for target and drafter; the last chunk draws the first token, or takes a resumed one as it is."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from mtp_jax.core.layout import NO_TOKEN
from mtp_jax.core.shapes import PrefillShape
from mtp_jax.core.types import Accepted, DecodeState, Drafts, Needs, PrefillInputs, SlotView, StepOutputs
from mtp_jax.models.api import Weights
from mtp_jax.models.bound import Rows
from mtp_jax.ops.logprobs import prompt_logprobs, token_logprobs
from mtp_jax.ops.penalties import token_facts
from mtp_jax.ops.row_text import texts_of_rows
from mtp_jax.ops.sampling import choose_tokens, target_noise
from mtp_jax.proposers.api import PrefillChunk
from mtp_jax.step.commit import count_emitted, step_outputs, with_tokens
from mtp_jax.step.program import StepProgram


def prefill_step(
    weights: Weights,
    state: DecodeState,
    packed_YX: Int[Array, "Y X"],
    *,
    program: StepProgram,
    shape: PrefillShape,
    agreed: Needs | None = None,
) -> tuple[DecodeState, StepOutputs]:
    """Writes the chunk's KV and, after the last chunk, leaves the slot in the form every decode step leaves it in.

    A resumed request (preempted earlier) brings its known pending token: nothing is drawn again, and nothing emitted.
    `state` is donated. Rows with no tokens (`num_tokens` 0) are padding and change nothing.
    """
    prompt = PrefillInputs.unpack(
        packed_YX,
        num_stop_ids=program.num_stop_ids,
        list_sizes=program.list_sizes,
        max_model_len=state.history_BS.shape[1],
        agreed=agreed,
    )
    model = program.bind(weights)
    live = prompt.inputs.live
    row = jnp.arange(shape.chunk, dtype=jnp.int32)[None, :]
    rows = Rows(prompt.start, live, row < prompt.num_tokens[:, None], prompt.inputs.page_table_BP)
    tokens_YX = prompt.tokens_from(0, shape.chunk + program.proposer.lookahead)
    hidden_YTD, features_YTJ, kv = model.target(tokens_YX[:, : shape.chunk], rows, state.kv)

    # Padding rows point one past the last slot: read clipped, written nowhere.
    slot = jnp.where(live, prompt.slot, state.committed_len.shape[0])
    carry = jax.tree.map(lambda x: x.at[slot].get(mode="clip"), state.carry)
    chunk = PrefillChunk(
        features_YTJ=features_YTJ,
        tokens_YX=tokens_YX,
        start=prompt.start,
        is_first=prompt.is_first,
        num_tokens=prompt.num_tokens,
        num_known=prompt.num_known,
        live=live,
        page_table_YP=prompt.inputs.page_table_BP,
    )
    carry, draft_kv = program.proposer.prefill(model, carry, state.draft_kv, chunk)

    last_row = jnp.maximum(prompt.num_tokens - 1, 0)
    last_hidden_Y1D = jnp.take_along_axis(hidden_YTD, last_row[:, None, None], axis=1)
    logits_Y1V = model.unembed(last_hidden_Y1D)
    end = prompt.start + prompt.num_tokens
    is_resumed = prompt.pending_token != NO_TOKEN
    is_last = live & prompt.is_last
    history_BS = state.history_BS.at[slot].set(prompt.text_YS, mode="drop")
    sampling, vocab_size = prompt.inputs.sampling, program.family.vocab_size
    # The first token obeys the same rules as any other: seen from position end - 1, it is a step of one.
    slots = SlotView(
        committed_len=end - 1,
        pending_token=jnp.take_along_axis(tokens_YX, last_row[:, None], axis=1)[:, 0],
        live=is_last & ~is_resumed,
        draft_cap=jnp.zeros_like(end),
        num_positions=jnp.ones_like(end),
        limit=prompt.inputs.limit,
        page_table_BP=prompt.inputs.page_table_BP,
        history_BS=prompt.text_YS,
        sampling=sampling,
        noise_BWV=target_noise(sampling, end[:, None], vocab_size),
        facts=token_facts(sampling, prompt.text_YS, end, vocab_size),
    )
    no_drafts = Drafts(tokens_BK=jnp.zeros((end.shape[0], 0), jnp.int32))
    text = texts_of_rows(slots, no_drafts)
    drawn_Y1 = choose_tokens(logits_Y1V, slots.noise_BWV, slots.sampling, text, program.parallel)
    pending = jnp.where(is_resumed, prompt.pending_token, drawn_Y1[:, 0])
    carry = program.proposer.finish_prefill(carry, pending, is_last)

    accepted = Accepted(num_accepted=jnp.zeros_like(end), tokens_BE=drawn_Y1, target_tokens_BW=drawn_Y1)
    num_emitted, finished = count_emitted(accepted, slots)
    logprobs = token_logprobs(logits_Y1V, drawn_Y1, slots.sampling, program.max_logprobs, program.parallel)
    outputs = replace(
        step_outputs(accepted, no_drafts, slots, num_emitted, finished, logprobs),
        committed_len=jnp.where(is_last, end, 0),
        prompt_logprobs=prompt_logprobs(
            hidden_YTD,
            prompt.tokens_from(1, shape.chunk),
            model.unembed,
            prompt.needs_prompt_logprobs,
            program.max_logprobs,
            program.parallel,
        ),
    )
    new_state = DecodeState(
        kv=kv,
        draft_kv=draft_kv,
        committed_len=state.committed_len.at[slot].set(end, mode="drop"),
        history_BS=with_tokens(history_BS, end, pending[:, None], is_last.astype(jnp.int32), slot),
        pending_token=state.pending_token.at[slot].set(pending, mode="drop"),
        lists=jax.tree.map(lambda full, part: full.at[slot].set(part, mode="drop"), state.lists, prompt.lists),
        finished=state.finished.at[slot].set(jnp.where(is_last, finished, True), mode="drop"),
        carry=jax.tree.map(lambda full, part: full.at[slot].set(part, mode="drop"), state.carry, carry),
    )
    return new_state, outputs
