"""Pages that prompts share: their keys, who finds them, and when they are given up."""

import pytest

from mtp_jax.core.errors import InvariantError
from mtp_jax.engine.pages import PagePool
from mtp_jax.engine.prefixes import PrefixPages

PAGE_SIZE = 4


def prefixes(lookahead: int = 1, num_pages: int = 6) -> tuple[PagePool, PrefixPages]:
    pool = PagePool(num_pages)
    return pool, PrefixPages(pool, PAGE_SIZE, lookahead)


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("num_tokens", range(1, 14))
def test_a_page_is_shareable_if_the_prompt_reaches_past_it_and_a_token_is_left(num_tokens: int, lookahead: int) -> None:
    _, pages = prefixes(lookahead)
    num_keys = len(pages.keys(range(num_tokens)))
    assert num_keys * PAGE_SIZE + max(lookahead, 1) <= num_tokens or num_keys == 0
    assert (num_keys + 1) * PAGE_SIZE + max(lookahead, 1) > num_tokens


def test_keys_tell_texts_apart_that_differ_before_in_or_right_behind_a_page() -> None:
    _, pages = prefixes(lookahead=2)
    text = list(range(12))
    key = pages.keys(text)[1]
    for place in range(10):  # the second page ends at 8, and the drafter looks at 8 and 9
        other = [*text[:place], 99, *text[place + 1 :]]
        assert pages.keys(other)[1] != key, place
    assert pages.keys([*text[:10], 99, 99])[1] == key


def test_published_pages_are_found_as_far_as_a_text_goes_on_alike() -> None:
    pool, pages = prefixes()
    keys = pages.keys(range(13))
    held = pool.take(4)
    pages.publish(keys[:2], held[:2])
    assert pages.find(keys) == held[:2]
    assert pages.find(pages.keys([*range(6), 99, *range(7, 13)])) == held[:1]
    assert pages.find(pages.keys([99, *range(1, 13)])) == []


def test_the_first_page_with_a_content_stays_the_one_that_is_found() -> None:
    pool, pages = prefixes()
    keys = pages.keys(range(6))
    first, second = pool.take(1), pool.take(1)
    pages.publish(keys, first)
    pages.publish(keys, second)
    pool.give_back(second)
    assert pages.find(keys) == first
    assert pool.num_free == 5


def test_pages_without_a_holder_are_found_until_they_are_taken_the_oldest_and_the_last_of_a_text_first() -> None:
    pool, pages = prefixes()
    old, new = pages.keys(range(9)), pages.keys(range(50, 59))
    of_old, of_new = pool.take(2), pool.take(2)
    pages.publish(old, of_old)
    pages.publish(new, of_new)
    pool.give_back(of_old)
    pool.give_back(of_new)
    assert (pages.find(old), pages.find(new), pool.num_free) == (of_old, of_new, 6)
    pool.take(3)  # two were never used; the third is the end of the text that was left first
    assert (pages.find(old), pages.find(new)) == (of_old[:1], of_new)
    pool.share(of_old[:1])  # found again: it is not idle any more
    pool.take(2)
    assert (pages.find(old), pages.find(new)) == (of_old[:1], [])
    assert pool.num_free == 0


def test_a_shared_page_goes_when_its_last_holder_does() -> None:
    pool, pages = prefixes(num_pages=2)
    held = pool.take(2)
    pages.publish(pages.keys(range(5)), held[:1])
    pool.share(held[:1])
    pool.give_back(held)
    assert pool.holders == {held[0]: 1}
    pool.give_back(held[:1])
    assert pool.holders == {}
    with pytest.raises(InvariantError, match="nobody held it"):
        pool.give_back(held[:1])


def test_a_page_that_was_not_kept_can_be_neither_shared_nor_kept_later() -> None:
    pool, _ = prefixes()
    held = pool.take(1)
    pool.give_back(held)
    with pytest.raises(InvariantError, match="cannot be shared"):
        pool.share(held)
    with pytest.raises(InvariantError, match="cannot be kept"):
        pool.keep(held[0], lambda: None)
