"""Page writes: each allowed row lands in its place, every other one on the null page, and nothing else changes."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.core.types import KVSpec
from mtp_jax.ops.kv_cache import NULL_PAGE, init_kv, page_addresses, row_positions, write_kv

NUM_PAGES, PAGE_SIZE, TABLE = 9, 4, 3
SPEC = KVSpec(1, 2, 2, None)


@given(
    base=st.lists(st.integers(0, 14), min_size=2, max_size=2),
    table=st.permutations(range(1, NUM_PAGES + 1)),
    may_write=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_rows_land_where_the_table_says(base: list[int], table: list[int], may_write: list[bool]) -> None:
    table_BP = np.array(table[: 2 * TABLE]).reshape(2, TABLE)
    allowed_BW = np.array(may_write).reshape(2, 3)
    rows_BWGC = np.arange(1, 13, dtype=np.float32).reshape(2, 3, 1, 2)
    (layer,) = init_kv([SPEC], num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=jnp.dtype("float32"))
    positions = row_positions(jnp.array(base, jnp.int32), 3)
    addresses = page_addresses(positions, jnp.asarray(table_BP, jnp.int32), jnp.asarray(allowed_BW), PAGE_SIZE)
    written = write_kv(layer, jnp.asarray(rows_BWGC), jnp.asarray(-rows_BWGC), addresses)

    expected = np.zeros((NUM_PAGES + 1, PAGE_SIZE, 1, 2), np.float32)
    for b in range(2):
        for w in range(3):
            position = base[b] + w
            if allowed_BW[b, w] and position < TABLE * PAGE_SIZE:
                expected[table_BP[b, position // PAGE_SIZE], position % PAGE_SIZE] = rows_BWGC[b, w]
    assert written.v_pages is not None
    assert np.array_equal(written.k_pages[1:], expected[1:])
    assert np.array_equal(written.v_pages[1:], -expected[1:])


@pytest.mark.parametrize("may_write", [True, False])
def test_one_row_alone(may_write: bool) -> None:
    """The shape that XLA would turn into another operation: the same rule."""
    (layer,) = init_kv([SPEC], num_pages=2, page_size=PAGE_SIZE, dtype=jnp.dtype("float32"))
    row = jnp.full((1, 1, 1, 2), 7.0)
    addresses = page_addresses(jnp.array([[5]]), jnp.array([[2, 1]]), jnp.array([[may_write]]), PAGE_SIZE)
    k_pages = np.asarray(write_kv(layer, row, row, addresses).k_pages)
    expected = np.zeros_like(k_pages)
    expected[1 if may_write else NULL_PAGE, 1] = 7
    assert np.array_equal(k_pages, expected)


def test_positions_before_the_start_go_to_the_null_page() -> None:
    ids, _ = page_addresses(jnp.array([[-1, 0]]), jnp.array([[3]]), jnp.ones((1, 2), bool), PAGE_SIZE)
    assert ids.tolist() == [[NULL_PAGE, 3]]


def test_a_latent_pool_has_no_values_and_stays_so() -> None:
    (layer,) = init_kv([KVSpec(1, 3, None, None)], num_pages=2, page_size=PAGE_SIZE, dtype=jnp.dtype("bfloat16"))
    assert layer.v_pages is None
    addresses = page_addresses(jnp.array([[0, 1]]), jnp.array([[1]]), jnp.ones((1, 2), bool), PAGE_SIZE)
    written = write_kv(layer, jnp.ones((1, 2, 1, 3)), None, addresses)
    assert written.v_pages is None
    assert written.k_pages.dtype == jnp.bfloat16
    assert written.k_pages[1, :2].tolist() == [[[1, 1, 1]], [[1, 1, 1]]]


def test_each_layer_gets_a_pool_of_its_own_shape() -> None:
    pools = init_kv(
        [KVSpec(2, 8, 4, "kv_heads"), KVSpec(1, 6, None, None)], num_pages=5, page_size=3, dtype=jnp.dtype("float32")
    )
    assert [pool.k_pages.shape for pool in pools] == [(6, 3, 2, 8), (6, 3, 1, 6)]
    assert pools[0].v_pages is not None
    assert pools[0].v_pages.shape == (6, 3, 2, 4)
