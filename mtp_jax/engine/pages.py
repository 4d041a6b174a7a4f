"""The page pool: who holds which page. Host arithmetic only.

A page may have several holders, and may be kept when the last one has left: `prefixes` says why and forgets it in time.
"""

from collections.abc import Callable

from mtp_jax.core.errors import InvariantError
from mtp_jax.core.layout import NULL_PAGE as NULL_PAGE


class OutOfPages(Exception):
    """Fewer pages are free than were asked for; nothing was taken."""


def pages_for(num_positions: int, page_size: int) -> int:
    """Pages that cover positions 0..num_positions-1.

    >>> pages_for(0, 16), pages_for(16, 16), pages_for(17, 16)
    (0, 1, 2)
    """
    return -(-num_positions // page_size)


class PagePool:
    """Pages 1..num_pages; page 0 is the null page and never given out."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))
        self._holders: dict[int, int] = {}
        self._on_loss: dict[int, Callable[[], None]] = {}  # by page whose content is worth keeping
        self._idle: dict[int, None] = {}  # kept pages without a holder, the one that was left first in front

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, those that are kept included: they can be taken too."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> frozenset[int]:
        """Pages that somebody holds."""
        return frozenset(self._holders)

    @property
    def holders(self) -> dict[int, int]:
        """How many hold each of them."""
        return dict(self._holders)

    def take(self, count: int) -> list[int]:
        """`count` pages without a holder, kept ones last and the longest idle first.

        `OutOfPages`, and none is taken, if there are fewer.
        """
        if count > self.num_free:
            raise OutOfPages(f"{count} pages wanted, {self.num_free} of {self.num_pages} free")
        for _ in range(count - len(self._free)):
            self._lose_oldest()
        if count == 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        self._holders.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, pages: list[int]) -> None:
        """One more holder for pages that somebody holds, or that are kept."""
        for page in pages:
            if page not in self._holders and page not in self._idle:
                raise InvariantError(f"page {page} cannot be shared: nobody holds it, and it was not kept")
            self._idle.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1

    def keep(self, page: int, on_loss: Callable[[], None]) -> None:
        """What a held page holds is worth keeping after its last holder; `on_loss` is called when it is given up."""
        if page not in self._holders:
            raise InvariantError(f"page {page} cannot be kept: nobody holds it")
        self._on_loss[page] = on_loss

    def give_back(self, pages: list[int]) -> None:
        """One holder leaves each of these pages."""
        for page in reversed(pages):  # so that the last pages of a text are lost before its first ones
            num_holders = self._holders.get(page, 0)
            if num_holders == 0:
                raise InvariantError(f"page {page} was given back but nobody held it")
            if num_holders > 1:
                self._holders[page] = num_holders - 1
                continue
            del self._holders[page]
            if page in self._on_loss:
                self._idle[page] = None
            else:
                self._free.append(page)

    def _lose_oldest(self) -> None:
        page = next(iter(self._idle))
        del self._idle[page]
        self._on_loss.pop(page)()
        self._free.append(page)
