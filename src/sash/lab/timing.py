"""Times of things that are done in turns, so that a machine that slows down slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def seconds(call: Callable[[], object]) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def in_turns(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of ``rounds`` calls of each, one of each in every round; who begins changes from round to round."""
    names = list(calls)
    out: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            out[name].append(seconds(calls[name]))
    return out


def ms(times: Sequence[float], pick: Callable[[Sequence[float]], float] = statistics.median) -> float:
    """Milliseconds of the median, or of what ``pick`` takes."""
    return 1000 * pick(times)
