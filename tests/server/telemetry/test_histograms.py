"""Histograms, percentiles of the last minutes, and counts by second, against plain lists."""

from __future__ import annotations

import math
import random

import pytest

from sash.server.telemetry.histograms import Histogram, Rates, Recent


class FakeClock:
    """A clock that is set by hand."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_a_bound_belongs_to_its_own_bucket() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0.0, 1.0, 1.5, 2.0, 4.9, 5.0, 5.1, 100.0):
        histogram.observe(value)
    assert list(histogram.buckets()) == [(1, 2), (2, 4), (5, 6), (math.inf, 8)]
    assert histogram.sum == pytest.approx(119.5)


@pytest.mark.parametrize("seed", range(3))
def test_percentiles_are_those_of_the_values(seed: int) -> None:
    rng, clock = random.Random(seed), FakeClock()
    recent = Recent(clock)
    values = [rng.lognormvariate(-3, 2) for _ in range(2000)]
    for value in values:
        clock.now += rng.random() * 0.1
        recent.observe(value, clock.now)
    values.sort()
    count, found = recent.percentiles((0.5, 0.95, 0.99))
    assert count == 2000 and found is not None
    for fraction, value in zip((0.5, 0.95, 0.99), found, strict=True):
        assert value == pytest.approx(values[math.ceil(fraction * 2000) - 1], rel=0.04)


def test_what_is_older_than_five_minutes_is_forgotten() -> None:
    clock = FakeClock()
    recent = Recent(clock)
    recent.observe(9.0, clock.now)
    clock.now += 200
    recent.observe(0.5, clock.now)
    assert recent.percentiles((0.5,))[0] == 2
    clock.now += 110
    count, found = recent.percentiles((0.5,))
    assert count == 1 and found == [pytest.approx(0.5, rel=0.04)]
    clock.now += 300
    assert recent.percentiles((0.5,)) == (0, None)
    recent.observe(0.0, clock.now)
    recent.observe(1e9, clock.now)
    count, found = recent.percentiles((0.1, 0.9))
    assert count == 2 and found is not None and found[0] < 1e-3 and found[1] > 1000, "the ends take what lies outside"


def test_counts_by_second() -> None:
    clock = FakeClock(50.0)
    rates = Rates(12, clock)
    for now in (50.1, 50.9, 52.5):
        rates.add(2, now)
    clock.now = 53.0
    assert rates.last(4) == [0, 4, 0, 2]
    clock.now = 70.0
    assert rates.last(11) == [0] * 11, "none of it was in the last seconds"


def test_a_count_is_spread_over_its_time() -> None:
    clock = FakeClock(50.0)
    rates = Rates(12, clock)
    rates.spread(30, 50.5, 53.5)
    clock.now = 55.0
    assert rates.last(5) == [5, 10, 10, 5, 0]
    rates.spread(7, 55.0, 55.0)
    rates.spread(100, 0.0, 100.0)
    clock.now = 101.0
    assert rates.last(4) == [1, 1, 1, 0], "a hundred over a hundred seconds; the last of them has just begun"
    clock.now = 120.0
    rates.spread(3, 119.0, 120.0)
    assert rates.last(11)[-1] == 3
