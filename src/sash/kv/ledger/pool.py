"""PagePool: the pages of one group, counted by reference."""

from __future__ import annotations

from array import array
from heapq import heappop, heappush

from sash.spec.errors import LedgerError, OutOfPagesError


class PagePool:
    """Pages 0 … num_pages - 1 of one group.

    A page is free or referenced. ``promised`` pages are free ones that admission has set aside for
    running requests; ``available`` is what nobody was promised. Lowest free pages go first, so that
    a request that runs alone gets neighbouring pages. ``slid_pages`` counts pages that a window has moved past and
    whose memory was taken over, ``written_rows`` the rows that steps were given pages for; both since the start.
    """

    __slots__ = ("_free", "num_pages", "promised", "refs", "slid_pages", "written_rows")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.refs = array("i", bytes(4 * num_pages))
        self._free = list(range(num_pages))  # a heap
        self.promised = 0
        self.slid_pages = self.written_rows = 0

    @property
    def num_free(self) -> int:
        """Pages that nobody references, promised ones included."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Free pages that are not promised."""
        return len(self._free) - self.promised

    def promise(self, count: int) -> None:
        """Set ``count`` available pages aside.

        Raises:
            OutOfPagesError: fewer are available; nothing changed.
        """
        if count > self.available:
            raise OutOfPagesError(f"{count} pages wanted, {self.available} available")
        self.promised += count

    def unpromise(self, count: int) -> None:
        """Take back a promise that was not used."""
        self.promised -= count

    def take(self, *, promised: bool) -> int:
        """A free page with one reference, out of a promise or of what is available.

        Raises:
            OutOfPagesError: none is left to this caller; nothing changed.
        """
        if not promised and self.available < 1:
            raise OutOfPagesError("no page is available")
        if promised:
            self.promised -= 1
        page = heappop(self._free)
        self.refs[page] = 1
        return page

    def retain(self, page: int) -> None:
        """One more reference to a page that has at least one.

        Raises:
            LedgerError: it has none.
        """
        if self.refs[page] < 1:
            raise LedgerError(f"page {page} is free and can't be shared")
        self.refs[page] += 1

    def release(self, page: int) -> None:
        """One reference less; the last one frees the page.

        Raises:
            LedgerError: it has none.
        """
        if self.refs[page] < 1:
            raise LedgerError(f"page {page} is freed twice")
        self.refs[page] -= 1
        if not self.refs[page]:
            heappush(self._free, page)

    def check(self) -> None:
        """Books of the pool: free pages have no reference, all others have, promises are covered.

        Raises:
            LedgerError: which of these is not so.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise LedgerError("a page is in the free list twice")
        wrong = [p for p in range(self.num_pages) if (p in free) != (self.refs[p] == 0)]
        if wrong:
            raise LedgerError(f"pages {wrong[:8]}: reference count and free list disagree")
        if not 0 <= self.promised <= len(self._free):
            raise LedgerError(f"{self.promised} pages promised, {len(self._free)} free")
