"""Numbers for people: sizes, tokens, times, rates, shares."""

from __future__ import annotations

import math


def size(num_bytes: float, *, up: bool = False) -> str:
    """Three figures in binary units: ``2.91 GiB``. ``up``: never less than it is, for what is needed."""
    value, units = float(num_bytes), ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    for unit in units:
        if abs(value) < 999.5 or unit == units[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{figures(value, up=up)} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def figures(value: float, *, up: bool = False) -> str:
    """Three figures, more where the whole part has more; ``up``: rounded up."""
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{math.ceil(value * 10**digits) / 10**digits if up else value:.{digits}f}"


def amount(value: float) -> str:
    """Three figures with a decimal prefix: ``27.0 G``."""
    for unit in ("", " k", " M", " G", " T", " P", " E"):
        if abs(value) < 999.5 or unit == " E":
            return f"{value:.0f}" if unit == "" and value == int(value) else figures(value) + unit
        value /= 1000
    raise AssertionError("unreachable")


def tokens_of(count: int) -> str:
    """``32 768 tokens``."""
    return f"{spaced(count)} token{'' if count == 1 else 's'}"


def spaced(count: int) -> str:
    """A whole number in groups of three from 10 000 on."""
    return str(count) if abs(count) < 10_000 else f"{count:,}".replace(",", "\u202f")


def share(part: float, whole: float) -> str:
    """Percent; nothing of nothing is 0 %."""
    percent = 100 * part / whole if whole else 0.0
    return (
        f"{percent:.0f} %"
        if percent >= 9.95 or percent == 0
        else f"{percent:.1f} %"
        if percent >= 0.1
        else "under 0.1 %"
    )


def seconds(value: float) -> str:
    """``12.3 ms``, ``1.23 s``, ``3.4 min``, ``2.1 h``."""
    if value < 1e-3:
        return f"{figures(value * 1e6)} µs"
    if value < 1:
        return f"{figures(value * 1e3)} ms"
    if value < 120:
        return f"{figures(value)} s"
    return f"{figures(value / 60)} min" if value < 7200 else f"{figures(value / 3600)} h"
