"""Histograms that cost well under a microsecond an observation: one for Prometheus, one of the last minutes."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

Clock = Callable[[], float]

# Buckets of `Recent`: each is 7 % wider than the one before, from 0.1 ms to half an hour.
_LOWEST = 1e-4
_RATIO = 1.07
_NUM_BUCKETS = 248
_BOUNDS = tuple(_LOWEST * _RATIO**i for i in range(_NUM_BUCKETS - 1))
_SLOT_S = 10.0
_NUM_SLOTS = 30


class Histogram:
    """Counts by upper bounds, as Prometheus wants them.

    Args:
        bounds: ascending; what lies above the last one counts under +Inf.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> Iterable[tuple[float, int]]:
        """(bound, values up to it), the last bound being infinite."""
        total = 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            total += count
            yield bound, total


class Recent:
    """Percentiles of the last five minutes, in steps of ten seconds, to 4 %."""

    __slots__ = ("_clock", "_counts", "_slot", "_slots")

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._slot = -1
        self._counts = [0] * _NUM_BUCKETS
        # Of each ten seconds that had a value.
        self._slots: dict[int, list[int]] = {}

    def observe(self, value: float, now: float) -> None:
        """Count one value, in seconds, at ``now`` of the clock."""
        slot = int(now / _SLOT_S)
        if slot != self._slot:
            self._slot = slot
            self._counts = self._slots.setdefault(slot, [0] * _NUM_BUCKETS)
            self._forget(slot)
        self._counts[bisect_left(_BOUNDS, value)] += 1

    def _forget(self, slot: int) -> None:
        for old in [old for old in self._slots if old <= slot - _NUM_SLOTS]:
            del self._slots[old]

    def percentiles(self, fractions: Sequence[float]) -> tuple[int, list[float] | None]:
        """How many values there were, and for each fraction the value below which it lies; None without values."""
        self._forget(int(self._clock() / _SLOT_S))
        merged = [sum(column) for column in zip(*self._slots.values(), strict=True)]
        total = sum(merged)
        if not total:
            return 0, None
        return total, [self._at(merged, math.ceil(fraction * total)) for fraction in fractions]

    @staticmethod
    def _at(merged: list[int], rank: int) -> float:
        """The middle of the bucket in which the value of this rank lies, counted from 1."""
        seen = 0
        for index, count in enumerate(merged):
            seen += count
            if seen >= rank:
                return float(_LOWEST * _RATIO ** (index - 0.5))
        raise AssertionError("a rank above the number of values")


class Timing:
    """One duration that both are kept of.

    Args:
        bounds: of the Prometheus histogram, in seconds.
        clock: monotonic.
    """

    __slots__ = ("recent", "whole")

    def __init__(self, bounds: Sequence[float], clock: Clock = time.monotonic) -> None:
        self.whole = Histogram(bounds)
        self.recent = Recent(clock)

    def observe(self, value: float, now: float) -> None:
        """Count a duration that ended at ``now``, both in seconds."""
        self.whole.observe(value)
        self.recent.observe(value, now)


class Rates:
    """What happened in each of the last seconds.

    Args:
        seconds: how many are kept.
        clock: monotonic.
    """

    __slots__ = ("_clock", "_counts", "_second")

    def __init__(self, seconds: int, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._counts = [0.0] * seconds
        self._second = int(clock())

    def add(self, count: float, now: float) -> None:
        """So many more at ``now`` of the clock."""
        second = int(now)
        if second != self._second:
            self._turn(second)
        self._counts[second % len(self._counts)] += count

    def spread(self, count: float, since: float, now: float) -> None:
        """So many more, evenly from ``since`` to ``now``; what was too long ago is not kept."""
        if now <= since:
            self.add(count, now)
            return
        size, second = len(self._counts), int(now)
        self._turn(second)
        for part in range(max(int(since), second - size + 1), second + 1):
            overlap_s = min(now, part + 1) - max(since, part)
            self._counts[part % size] += count * overlap_s / (now - since)

    def _turn(self, second: int) -> None:
        size = len(self._counts)
        for old in range(max(self._second + 1, second - size + 1), second + 1):
            self._counts[old % size] = 0.0
        self._second = max(self._second, second)

    def last(self, seconds: int) -> list[float]:
        """Counts of the last whole seconds, oldest first; the one that runs now is not among them."""
        now = int(self._clock())
        self._turn(now)
        size = len(self._counts)
        return [self._counts[(now - i) % size] for i in range(min(seconds, size - 1), 0, -1)]
