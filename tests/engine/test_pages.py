"""The page pool: who holds which page."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.core.errors import InvariantError
from mtp_jax.engine.pages import NULL_PAGE, OutOfPages, PagePool, pages_for


@given(num_positions=st.integers(0, 200), page_size=st.integers(1, 64))
def test_pages_cover_positions_and_no_more(num_positions: int, page_size: int) -> None:
    pages = pages_for(num_positions, page_size)
    assert pages * page_size >= num_positions
    assert num_positions == 0 or (pages - 1) * page_size < num_positions


@given(operations=st.lists(st.integers(-3, 6), max_size=40), num_pages=st.integers(1, 12))
def test_the_pool_is_a_set_that_never_gives_a_page_twice(operations: list[int], num_pages: int) -> None:
    """Positive: take that many. Otherwise: give back one of the parcels held."""
    pool = PagePool(num_pages)
    parcels: list[list[int]] = []
    for operation in operations:
        held = {page for parcel in parcels for page in parcel}
        if operation > 0:
            if operation > num_pages - len(held):
                with pytest.raises(OutOfPages):
                    pool.take(operation)
            else:
                taken = pool.take(operation)
                assert len(taken) == operation
                assert not held & set(taken)
                parcels.append(taken)
        elif parcels:
            pool.give_back(parcels.pop(operation % len(parcels)))
        held = {page for parcel in parcels for page in parcel}
        assert pool.held == held
        assert pool.num_free == num_pages - len(held)
        assert NULL_PAGE not in held
        assert held <= set(range(1, num_pages + 1))


def test_a_page_that_nobody_holds_cannot_be_given_back() -> None:
    pool = PagePool(3)
    pages = pool.take(2)
    pool.give_back(pages)
    for wrong in (pages[:1], [NULL_PAGE], [4]):
        with pytest.raises(InvariantError, match="nobody held it"):
            pool.give_back(wrong)


def test_nothing_is_taken_when_too_much_is_asked() -> None:
    pool = PagePool(2)
    with pytest.raises(OutOfPages, match="3 pages wanted, 2 of 2 free"):
        pool.take(3)
    assert pool.num_free == 2
    assert pool.take(0) == []
