"""The carry of an MTP proposer, against plain lists."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.proposers.features import Features, empty_features, roll_features, select_slots

NUM_ROWS = 5
rolled = jax.jit(roll_features)


def features(tokens: list[list[int]]) -> Features:
    """Hidden state of a row: its token, twice."""
    num_fresh = jnp.array([len(row) for row in tokens], jnp.int32)
    padded = jnp.array([row + [-1] * (NUM_ROWS - len(row)) for row in tokens], jnp.int32)
    return Features(jnp.repeat(padded[..., None], 2, axis=-1).astype(jnp.float32), padded, num_fresh)


def rows_of(carry: Features, slot: int) -> list[int]:
    count = int(carry.num_fresh[slot])
    hidden = np.asarray(carry.hidden_BFD[slot, :count])
    tokens = carry.tokens_BF[slot, :count].tolist()
    assert hidden.tolist() == [[token, token] for token in tokens]  # a row's two halves never part
    return tokens


@given(
    old=st.lists(st.lists(st.integers(0, 99), max_size=NUM_ROWS), min_size=2, max_size=2),
    new=st.lists(st.lists(st.integers(100, 199), min_size=4, max_size=4), min_size=2, max_size=2),
    num_new=st.lists(st.integers(0, 4), min_size=2, max_size=2),
    keep=st.lists(st.integers(0, NUM_ROWS), min_size=2, max_size=2),
)
def test_rolling_keeps_the_last_rows(
    old: list[list[int]], new: list[list[int]], num_new: list[int], keep: list[int]
) -> None:
    new_rows = jnp.array(new, jnp.int32)
    hidden = jnp.repeat(new_rows[..., None], 2, axis=-1).astype(jnp.float32)
    carry = rolled(features(old), hidden, new_rows, jnp.array(num_new, jnp.int32), jnp.array(keep, jnp.int32))
    for slot in range(2):
        joined = old[slot] + new[slot][: num_new[slot]]
        assert rows_of(carry, slot) == joined[len(joined) - min(keep[slot], len(joined)) :]


def test_slots_that_are_not_selected_keep_theirs() -> None:
    old, new = features([[1, 2], [3]]), features([[7], [8, 9]])
    chosen = select_slots(jnp.array([True, False]), new, old)
    assert [rows_of(chosen, slot) for slot in range(2)] == [[7], [3]]


def test_an_empty_carry_has_no_row() -> None:
    carry = empty_features(3, NUM_ROWS, 2, jnp.dtype("bfloat16"))
    assert carry.num_fresh.tolist() == [0, 0, 0]
    assert carry.hidden_BFD.dtype == jnp.bfloat16
