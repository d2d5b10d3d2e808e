"""The rows that the matrix runs: made from fixed seeds, so that a red row stays red."""

from __future__ import annotations

from functools import lru_cache

from tests.equivalence.axes import AXES, BASE, active
from tests.equivalence.covering import Row, covering_array, report, sample

PARTS = 40  # the slow rows are run in so many tests


@lru_cache(maxsize=1)
def pairs() -> list[Row]:
    """A covering array of every two values."""
    return covering_array(AXES, active, BASE, strength=2, seed=1)


@lru_cache(maxsize=1)
def triples() -> list[Row]:
    """A covering array of every three values."""
    return covering_array(AXES, active, BASE, strength=3, seed=1, tries=6)


def random_rows(count: int, seed: int) -> list[Row]:
    """A seeded sample."""
    return sample(AXES, count, seed)


def coverage(passed: list[int]) -> tuple[list[str], int]:
    """Lines about the pairs that the rows ``passed`` cover, and the number of pairs that they miss."""
    lines, missing = report([pairs()[i] for i in passed], AXES, active, BASE)
    return lines, len(missing)
