"""Cached equals uncached, over a matrix: every pair of values in ``make test``, every triple in ``make test-all``."""

from __future__ import annotations

import pytest
from tests.equivalence.axes import AXES, BASE, active
from tests.equivalence.covering import Row, covered, wanted
from tests.equivalence.rows import PARTS, coverage, pairs, random_rows, triples
from tests.equivalence.scenario import play

PAIRS = pairs()
SAMPLE = random_rows(60, seed=2)


@pytest.mark.parametrize("index", range(len(PAIRS)))
def test_pairs(index: int) -> None:
    _play(PAIRS[index], index)


@pytest.mark.parametrize("index", range(len(SAMPLE)))
def test_sample(index: int) -> None:
    _play(SAMPLE[index], 1000 + index)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_triples(part: int) -> None:
    for index in range(part, len(triples()), PARTS):
        _play(triples()[index], 10_000 + index)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_two_thousand_random_rows(part: int) -> None:
    rows = random_rows(2000, seed=3)
    for index in range(part, len(rows), PARTS):
        _play(rows[index], 100_000 + index)


def _play(row: Row, seed: int) -> None:
    print(seed, row)  # shown when the row fails
    play(row, seed)


def test_every_pair_is_covered() -> None:
    lines, missing = coverage(list(range(len(PAIRS))))
    print("\n".join(lines))
    assert not missing, f"{missing} pairs are not covered"
    # The last row was made for pairs that no other has.
    _, without_one = coverage(list(range(len(PAIRS) - 1)))
    assert without_one, "the count would not notice a row that is gone"


@pytest.mark.slow
def test_every_triple_is_covered() -> None:
    missing = wanted(AXES, active, BASE, 3)
    for row in triples():
        missing -= covered(row, active, 3)
    assert not missing, f"{len(missing)} triples are not covered"


def test_axes_that_mean_nothing_cover_nothing() -> None:
    full = {**BASE, "layers": "all full", "window": "P"}
    assert "window" not in active(full) and "kind" not in active(full)
    assert (("layers", "all full"), ("window", "P")) not in wanted(AXES, active, BASE, 2)
    assert (("kind", "sinks"), ("window", "P")) in wanted(AXES, active, BASE, 2)
