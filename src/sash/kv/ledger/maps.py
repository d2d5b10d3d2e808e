"""page_runs: what stands in a pool, told by runs of pages; quick enough to be asked for while steps run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sash.kv.ledger.table import EMPTY, PageTable

# (owner, pages, number)
Run = tuple[str, int, int]


def page_runs(tables: Iterable[tuple[str, PageTable]], num_pages: int) -> list[Run]:
    """A pool from its first page to its last, as runs (owner, pages, number).

    Args:
        tables: of all requests with their ids, oldest first; a shared page is told as the oldest's.
        num_pages: of the pool.

    ``number`` is which of its owner's pages the run's first one is (position // page_size); the others follow it one
    by one. Free pages have the owner "" and the number 0.
    """
    taken = bytearray(num_pages)
    found: list[tuple[int, int, str, int]] = []
    for request_id, table in tables:
        for page, count, number in _parts(table):
            for first, length in _untaken(taken, page, count):
                found.append((first, length, request_id, number + first - page))
                taken[first : first + length] = b"\1" * length
    runs: list[Run] = []
    end = 0
    for first, length, owner, number in sorted(found):
        if first > end:
            runs.append(("", first - end, 0))
        if runs and runs[-1][0] == owner and sum(runs[-1][1:]) == number:
            runs[-1] = (owner, runs[-1][1] + length, runs[-1][2])
        else:
            runs.append((owner, length, number))
        end = first + length
    return [*runs, ("", num_pages - end, 0)] if end < num_pages else runs


def _parts(table: PageTable) -> Iterator[tuple[int, int, int]]:
    """Neighbouring columns with neighbouring pages: (first page, pages, number of the first)."""
    columns, shape = table.columns, table.shape
    # Behind these columns the numbers don't go on: the last pinned one, and the newest of the ring.
    breaks = {shape.pin, shape.column(table.top) + 1} if table.top >= 0 else set()
    start, last = 0, EMPTY
    for column, page in enumerate(columns):
        if page != last + 1 or last == EMPTY or column in breaks:
            if last != EMPTY:
                yield columns[start], column - start, table.page_number(start)
            start = column
        last = page
    if last != EMPTY:
        yield columns[start], len(columns) - start, table.page_number(start)


def _untaken(taken: bytearray, page: int, count: int) -> Iterator[tuple[int, int]]:
    """The parts of ``count`` pages from ``page`` on that nobody has taken yet."""
    end = page + count
    while page < end:
        stop = taken.find(1, page, end)
        if stop < 0:
            stop = end
        if stop > page:
            yield page, stop - page
        page = stop
        while page < end and taken[page]:
            page += 1
