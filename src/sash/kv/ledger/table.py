"""PageTable: the pages of one request in one group; a ring where the group's span is bounded."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from sash.kv.ledger.pool import PagePool
from sash.spec.errors import LedgerError
from sash.spec.footprint import TableShape, ceil_div
from sash.spec.span import BoundSpan

EMPTY = -1


@dataclass(frozen=True, slots=True)
class TableStep:
    """What a step does to one table: pages to read, then pages to write, of the same pool.

    ``read`` is valid for rows before the step's first position, ``write`` for its rows from
    ``kept_from`` on and for pinned pages; both are columns (``shape.column``). Each layer attends
    before it writes, so a page may stand in both for different positions. ``copies`` (source,
    target) must be made before the step's first layer: rows of shared pages that go on in a fresh
    one.
    """

    shape: TableShape
    bound: BoundSpan
    read: array[int]
    write: array[int]
    kept_from: int
    copies: tuple[tuple[int, int], ...] = ()

    def kept(self, start: int, end: int) -> tuple[range, range]:
        """Which of the step's rows ``start`` … ``end`` - 1 are written: on pinned pages, and from the window on."""
        return _kept_rows(self.shape, self.kept_from, start, end)

    def keeps(self, position: int) -> bool:
        """Whether the row at ``position`` of this step is written."""
        return any(position in rows for rows in self.kept(position, position + 1))


def _kept_rows(shape: TableShape, kept_from: int, start: int, end: int) -> tuple[range, range]:
    """Rows start … end - 1 that some later query can see: pinned ones, and those from ``kept_from`` on."""
    pinned = shape.pin * shape.page_size
    return range(start, min(end, pinned)), range(max(start, kept_from, pinned), end)


class PageTable:
    """Columns of one request in one group.

    Pinned pages take the first columns and never slide. Every other page i takes column
    ``pin + i % ring``; the page that a new one replaces there is dead by construction: none of its
    rows can be seen once the step's queries have attended. A private page is taken over in place, a
    shared one is left to its other owners and a fresh one taken. So the table never holds more than
    pin + ring pages, whatever the chunk.

    A step may begin before the end of the one before it, by at most ``shape.slack`` rows: what it
    gives up is overwritten, and every row that it or a later one can see is still there.

    ``promise`` is the number of pages this request may still take without asking.
    """

    __slots__ = ("_copying", "_pool", "bound", "columns", "promise", "shape", "top")

    def __init__(self, pool: PagePool, shape: TableShape, bound: BoundSpan) -> None:
        self._pool = pool
        self.shape = shape
        self.bound = bound
        self.columns: array[int] = array("i")
        self.promise = 0
        self.top = -1  # highest page index that has had a page
        self._copying = False  # whether the last step goes on in copies of shared pages

    def _written_rows(self, start: int, count: int) -> tuple[range, range]:
        """Of rows start … start + count - 1 those that are written."""
        return _kept_rows(self.shape, self._kept_from(start + count), start, start + count)

    def _pages_of(self, rows: tuple[range, range]) -> list[int]:
        """Indices of the pages that these rows lie on, ascending."""
        size = self.shape.page_size
        return [i for part in rows if part for i in range(part.start // size, ceil_div(part.stop, size))]

    def _kept_from(self, end: int) -> int:
        """First row, pinned pages apart, that a query at ``end`` or later can see, or could after a step back."""
        return self.bound.retained_from(max(0, end - self.shape.slack))

    def _page_at(self, column: int) -> int:
        return self.columns[column] if column < len(self.columns) else EMPTY

    def fresh_pages(self, start: int, count: int) -> int:
        """Pages that ``reserve`` of the same rows would take from the pool."""
        fresh = 0
        for index in self._pages_of(self._written_rows(start, count)):
            page = self._page_at(self.shape.column(index))
            fresh += page == EMPTY or self._pool.refs[page] > 1
        return fresh

    def reserve(self, start: int, count: int) -> TableStep:
        """Pages for rows start … start + count - 1; the caller has made sure that enough are free.

        Changes the table; the returned views stay valid as long as steps run in order.

        Raises:
            OutOfPagesError: the pool is short; the table may be half changed.
        """
        read, copies, columns = self.columns, [], self.columns
        shape, refs = self.shape, self._pool.refs
        live_page = (start - 1) // shape.page_size if start % shape.page_size else EMPTY
        rows = self._written_rows(start, count)
        self._pool.written_rows += sum(map(len, rows))
        for index in self._pages_of(rows):
            column = shape.column(index)
            page = self._page_at(column)
            self._pool.slid_pages += page != EMPTY and index > self.top
            if page != EMPTY and refs[page] == 1:
                continue
            if columns is read:
                columns = read[:]
            columns.extend([EMPTY] * (column + 1 - len(columns)))
            columns[column] = fresh = self._take()
            if page != EMPTY:
                self._pool.release(page)
                if index == live_page:
                    copies.append((page, fresh))
            self.columns = columns
        self.columns = columns
        self.top = max(self.top, (start + count - 1) // shape.page_size)
        self._copying = bool(copies)
        return TableStep(shape, self.bound, read, columns, self._kept_from(start + count), tuple(copies))

    def _take(self) -> int:
        page = self._pool.take(promised=self.promise > 0)
        self.promise -= self.promise > 0
        return page

    def repeatable(self, start: int) -> bool:
        """Whether a step from ``start`` that was reserved, and perhaps run, can be run once more:
        every row before ``start`` that its queries see is still in its page."""
        if self._copying:
            return False  # whether the copies were made is not known
        first = self.bound.first(start)
        if first >= start:
            return True
        # Pinned pages stay; of the others the lowest is overwritten first.
        size, lowest = self.shape.page_size, max(first // self.shape.page_size, self.shape.pin)
        return lowest > (start - 1) // size or lowest > self.top - self.shape.ring

    def fork(self, length: int, pool_copies: list[tuple[int, int]]) -> PageTable:
        """A second table over the same rows 0 … length - 1.

        Whole pages of an unbounded group are shared; a page that will be written again (the last
        partial one, and every page of a ring) is copied: ``pool_copies`` receives (source, target),
        to be made once the rows are written. The caller has made sure that enough pages are
        available, see ``fork_pages``.
        """
        twin = PageTable(self._pool, self.shape, self.bound)
        twin.top = self.top
        twin.columns = array("i", self.columns)
        for column, page in enumerate(self.columns):
            if page == EMPTY:
                continue
            if self._copied_by_fork(column, length):
                twin.columns[column] = self._pool.take(promised=False)
                pool_copies.append((page, twin.columns[column]))
            else:
                self._pool.retain(page)
        return twin

    def fork_pages(self, length: int) -> int:
        """Pages that ``fork`` takes."""
        return sum(p != EMPTY and self._copied_by_fork(c, length) for c, p in enumerate(self.columns))

    def _copied_by_fork(self, column: int, length: int) -> bool:
        whole_pages = length // self.shape.page_size
        return (self.bound.span.bounded and column >= self.shape.pin) or column >= whole_pages

    def release(self) -> None:
        """Give every page and the rest of the promise back."""
        for page in self.columns:
            if page != EMPTY:
                self._pool.release(page)
        self._pool.unpromise(self.promise)
        self.columns, self.promise, self.top = array("i"), 0, -1

    def page_number(self, column: int) -> int:
        """Which page of the request (its positions from page_number · page_size on) stands in ``column`` of the ring,
        or would have been the last to; ``top`` must have had a page."""
        shape = self.shape
        return column if column < shape.pin else self.top - (self.top - column) % shape.ring

    @property
    def num_pages(self) -> int:
        """Pages that the table references, shared ones included."""
        return sum(page != EMPTY for page in self.columns)

    @property
    def num_private(self) -> int:
        """Pages that only this table references."""
        return sum(page != EMPTY and self._pool.refs[page] == 1 for page in self.columns)

    def check(self) -> None:
        """The table's own rules: bounded size, live pages, no page twice.

        Raises:
            LedgerError: which one is broken.
        """
        held = [p for p in self.columns if p != EMPTY]
        if len(held) > self.shape.pin + self.shape.ring:
            raise LedgerError(f"{len(held)} pages in a table of {self.shape.pin} + {self.shape.ring}")
        if len(set(held)) != len(held) or any(self._pool.refs[p] < 1 for p in held):
            raise LedgerError("a table has a page twice, or a freed page")
