"""Pages of prompts that others may begin with too: found by what they hold, kept until room is needed.

What a page holds depends on every token up to its end, and in the drafter's layers on `lookahead` tokens behind it:
layer d's entry at position i was made with token i + 1 + d. So a page's key is a hash of all of these, and two prompts
that part right behind a page do not share it.

A page is published once the prefill that fills it was launched, and only if the prompt reaches `lookahead` tokens past
its end: what is written later, by the drafter's catch-up or a decode step, lies behind. Launches run in order, so
whoever finds the page reads it after it was written.
"""

import functools
import hashlib
from array import array
from collections.abc import Sequence

from mtp_jax.engine.pages import PagePool


class PrefixPages:
    """The published pages of one data shard."""

    def __init__(self, pool: PagePool, page_size: int, lookahead: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._lookahead = lookahead
        self._pages: dict[bytes, int] = {}

    def keys(self, tokens: Sequence[int]) -> tuple[bytes, ...]:
        """A key for each page of this text that may be shared: its first ones.

        One token at least stays to be computed: the one that the first output token is drawn after.
        """
        behind = max(self._lookahead, 1)
        keys: list[bytes] = []
        key = b""
        for start in range(0, len(tokens) - behind - self._page_size + 1, self._page_size):
            covered = array("q", tokens[start : start + self._page_size + self._lookahead])
            key = hashlib.sha256(key + covered.tobytes()).digest()
            keys.append(key)
        return tuple(keys)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The published pages of the longest beginning; not held yet, see `PagePool.share`."""
        found: list[int] = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def publish(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """These pages now hold what their keys say. Where a key has a page already, that one stays."""
        for key, page in zip(keys, pages, strict=True):
            if key not in self._pages:
                self._pages[key] = page
                self._pool.keep(page, functools.partial(self._forget, key))

    def _forget(self, key: bytes) -> None:
        del self._pages[key]
