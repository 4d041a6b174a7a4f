"""The page pool: who holds which page. Host arithmetic only."""

from mtp_jax.core.errors import InvariantError

NULL_PAGE = 0


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
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def held(self) -> frozenset[int]:
        """Pages given out and not given back."""
        return frozenset(self._held)

    def take(self, count: int) -> list[int]:
        """`count` free pages; raises `OutOfPages`, and takes none, if there are fewer."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.num_pages} free")
        if count == 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        self._held.update(taken)
        return taken

    def give_back(self, pages: list[int]) -> None:
        """Returns pages to the pool."""
        for page in pages:
            if page not in self._held:
                raise InvariantError(f"page {page} was given back but nobody held it")
            self._held.remove(page)
        self._free.extend(reversed(pages))
