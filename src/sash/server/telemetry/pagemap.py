"""PageMap: what stands in a pool, small enough to be sent four times a second."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

# More cells than a screen shows well, and what 30 KB hold.
MAX_CELLS = 2048


class PageMap(msgspec.Struct, frozen=True):
    """The pages of a pool from the first one to the last that isn't free, in cells of ``cell_pages`` pages.

    Args:
        num_pages: of the pool.
        cell_pages: pages in a cell, a power of two; the last cell may have fewer.
        owners: answer ids.
        runs: (owner, cells, number, held): cells of one owner side by side, ``owner`` being a place in ``owners`` or -1
            for free ones. ``held`` of each cell's pages are held, whoever by; the owner is whose most of them are.
            ``number`` is which of its owner's pages the first cell is (position // page_size), the others follow it one
            by one; of cells of many pages the newest of its owner's, and each is a run of its own.
    """

    num_pages: int
    cell_pages: int
    owners: list[str]
    runs: list[tuple[int, int, int, int]]


def fold(runs: Sequence[tuple[str, int, int]], num_pages: int, max_cells: int = MAX_CELLS) -> PageMap:
    """A map of a report (``PoolReport.page_map``), of at most ``max_cells`` cells."""
    used = runs[:-1] if runs and not runs[-1][0] else runs
    extent = sum(pages for _, pages, _ in used)
    cell_pages = 1
    while extent > cell_pages * max_cells:
        cell_pages *= 2
    owners = {owner: i for i, owner in enumerate(dict.fromkeys(owner for owner, _, _ in used if owner))}
    owners[""] = -1
    if cell_pages == 1:
        cells = [(owners[owner], pages, number, int(bool(owner))) for owner, pages, number in used]
    else:
        cells = _gathered([(owners[owner], pages, number) for owner, pages, number in used], cell_pages)
    return PageMap(num_pages, cell_pages, [owner for owner in owners if owner], cells)


def _gathered(runs: Sequence[tuple[int, int, int]], cell_pages: int) -> list[tuple[int, int, int, int]]:
    """Runs cut into cells."""
    cells: list[tuple[int, int, int, int]] = []
    shares: dict[int, int] = {}
    newest: dict[int, int] = {}
    room = cell_pages

    def close() -> None:
        held = sum(count for owner, count in shares.items() if owner >= 0)
        owner = max((owner for owner in shares if owner >= 0), key=shares.__getitem__, default=-1)
        cells.append((owner, 1, newest.get(owner, 0), held))
        shares.clear()
        newest.clear()

    for owner, pages, number in runs:
        while pages:
            part = min(pages, room)
            shares[owner] = shares.get(owner, 0) + part
            if owner >= 0:
                newest[owner] = max(newest.get(owner, 0), number + part - 1)
            pages, number, room = pages - part, number + part, room - part
            if not room:
                close()
                room = cell_pages
    if shares:
        close()
    return cells
