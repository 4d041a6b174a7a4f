"""How many tokens a slot gains, against the rules read out one token at a time."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.core.config import SamplingParams
from mtp_jax.core.shapes import StepShape
from mtp_jax.core.types import Accepted, DecodeState, StepInputs, TokenLists
from mtp_jax.step.commit import count_emitted, last_emitted
from mtp_jax.step.decode import view_slots
from mtp_jax.testing.rows import sampling_rows, slot_view

DRAFT_LEN, NUM_SLOTS = 3, 4
GREEDY = sampling_rows(*[SamplingParams(temperature=0)] * NUM_SLOTS)


def per_slot(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(strategy, min_size=NUM_SLOTS, max_size=NUM_SLOTS)


def emitted_by_hand(
    tokens: list[int], num_accepted: int, committed_len: int, limit: int, stops: list[int]
) -> tuple[int, bool]:
    num_emitted = 0
    for token in tokens[: num_accepted + 1]:
        if committed_len + num_emitted == limit:
            break
        num_emitted += 1
        if token in stops:
            return num_emitted, True
    return num_emitted, committed_len + num_emitted == limit


counted = jax.jit(count_emitted)


@given(
    tokens=per_slot(st.lists(st.integers(0, 5), min_size=DRAFT_LEN + 1, max_size=DRAFT_LEN + 1)),
    num_accepted=per_slot(st.integers(0, DRAFT_LEN)),
    room=per_slot(st.integers(1, 6)),
    live=per_slot(st.booleans()),
    stops=per_slot(st.lists(st.integers(-1, 5), min_size=2, max_size=2)),
    num_stops=per_slot(st.integers(0, 2)),
)
def test_what_is_emitted_is_read_out_by_hand(
    tokens: list[list[int]],
    num_accepted: list[int],
    room: list[int],
    live: list[bool],
    stops: list[list[int]],
    num_stops: list[int],
) -> None:
    committed = [10 * slot for slot in range(NUM_SLOTS)]
    slots = slot_view(
        replace(GREEDY, stop_ids_BI=jnp.array(stops, jnp.int32), num_stop_ids_B=jnp.array(num_stops, jnp.int32)),
        vocab_size=6,
        draft_len=DRAFT_LEN,
        committed_len=committed,
        pending_token=jnp.full((NUM_SLOTS,), 77, jnp.int32),
        live=jnp.array(live),
        limit=jnp.array(committed, jnp.int32) + jnp.array(room, jnp.int32),
    )
    rows = jnp.array(tokens, jnp.int32)
    accepted = Accepted(jnp.array(num_accepted, jnp.int32), tokens_BE=rows, target_tokens_BW=rows)
    num_emitted, finished = counted(accepted, slots)
    pending = last_emitted(accepted, num_emitted, slots.pending_token)
    for slot in range(NUM_SLOTS):
        expected, is_finished = emitted_by_hand(
            tokens[slot],
            num_accepted[slot],
            committed[slot],
            committed[slot] + room[slot],
            stops[slot][: num_stops[slot]],
        )
        if not live[slot]:
            expected, is_finished = 0, False
        assert (int(num_emitted[slot]), bool(finished[slot])) == (expected, is_finished)
        assert int(pending[slot]) == (tokens[slot][expected - 1] if expected else 77)


viewed = jax.jit(view_slots, static_argnums=(2, 3, 4))


@given(
    host_live=per_slot(st.booleans()),
    finished=per_slot(st.booleans()),
    host_cap=per_slot(st.integers(0, 5)),
    room=per_slot(st.integers(-1, 6)),
)
def test_the_device_cuts_what_the_host_asked_for(
    host_live: list[bool], finished: list[bool], host_cap: list[int], room: list[int]
) -> None:
    """A slot with r tokens to go drafts r - 1 at most; one that is finished, or not asked for, not at all."""
    committed = jnp.arange(NUM_SLOTS, dtype=jnp.int32) * 5 + 2
    no_list = jnp.zeros((NUM_SLOTS, 0), jnp.int32)
    state = DecodeState(
        kv=(),
        draft_kv=(),
        committed_len=committed,
        pending_token=committed,
        history_BS=jnp.zeros((NUM_SLOTS, 32), jnp.int32),
        lists=TokenLists(no_list, no_list.astype(jnp.float32), no_list[:, :, None]),
        finished=jnp.array(finished),
        carry=(),
    )
    inputs = StepInputs(
        live=jnp.array(host_live),
        draft_cap=jnp.array(host_cap, jnp.int32),
        limit=committed + jnp.array(room, jnp.int32),
        page_table_BP=jnp.zeros((NUM_SLOTS, 1), jnp.int32),
        sampling=GREEDY,
    )
    slots = viewed(state, inputs, StepShape(NUM_SLOTS, DRAFT_LEN), 6)
    for slot in range(NUM_SLOTS):
        is_live = host_live[slot] and not finished[slot]
        assert bool(slots.live[slot]) == is_live
        expected = max(min(host_cap[slot], DRAFT_LEN, room[slot] - 1), 0) if is_live else 0
        assert int(slots.draft_cap[slot]) == expected
