"""Page maps that are sent to the page: whole while they are small, gathered into cells when they are large."""

from __future__ import annotations

import random

import pytest

from sash.server.telemetry.pagemap import MAX_CELLS, fold


def cells(runs: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int]]:
    """(owner, number, held) of each cell."""
    return [(owner, number + i, held) for owner, count, number, held in runs for i in range(count)]


def test_a_small_map_keeps_every_page_and_drops_the_free_end() -> None:
    page_map = fold([("3.0", 2, 7), ("", 1, 0), ("1.1", 1, 0), ("3.0", 1, 6), ("", 12, 0)], 17)
    assert (page_map.num_pages, page_map.cell_pages, page_map.owners) == (17, 1, ["3.0", "1.1"])
    assert page_map.runs == [(0, 2, 7, 1), (-1, 1, 0, 0), (1, 1, 0, 1), (0, 1, 6, 1)]


def test_an_empty_pool_has_no_cells_and_a_full_one_all() -> None:
    assert fold([("", 9, 0)], 9).runs == []
    assert fold([], 0).runs == []
    assert cells(fold([("1.0", 9, 0)], 9).runs) == [(0, i, 1) for i in range(9)]


def test_a_cell_of_many_pages_is_its_largest_owners() -> None:
    runs = [("1.0", 3, 0), ("2.0", 1, 5), ("2.0", 2, 6), ("", 2, 0), ("", 4, 0), ("1.0", 1, 3), ("", 50, 0)]
    page_map = fold(runs, 63, max_cells=4)
    assert page_map.cell_pages == 4
    assert page_map.runs == [(0, 1, 2, 4), (1, 1, 7, 2), (-1, 1, 0, 0), (0, 1, 3, 1)]


@pytest.mark.parametrize("seed", range(5))
def test_cells_count_every_held_page(seed: int) -> None:
    rng = random.Random(seed)
    runs, total, held = [], 0, 0
    for i in range(rng.choice([5, 500, 3000])):
        owner, pages = rng.choice(["", "1.0", "2.0", "3.1"]), rng.randint(1, 9)
        runs.append((owner, pages, i))
        total, held = total + pages, held + (pages if owner else 0)
    page_map = fold(runs, total)
    found = cells(page_map.runs)
    assert len(found) <= MAX_CELLS and page_map.cell_pages & (page_map.cell_pages - 1) == 0
    assert sum(count for _, _, count in found) == held
    assert all((count == 0) == (owner == -1) and count <= page_map.cell_pages for owner, _, count in found)
    assert len(found) * page_map.cell_pages >= total - (runs[-1][1] if not runs[-1][0] else 0)
