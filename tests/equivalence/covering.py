"""Covering arrays: few cases in which every combination of values of any t axes occurs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product

Row = dict[str, str]
Tuple_ = tuple[tuple[str, str], ...]
Axes = Mapping[str, Sequence[str]]
# The axes of a row that matter: an axis that another value makes meaningless covers nothing.
Active = Callable[[Row], Row]


def covered(row: Row, active: Active, strength: int) -> set[Tuple_]:
    """Combinations of ``strength`` values that a row covers."""
    return set(combinations(sorted(active(row).items()), strength))


def wanted(axes: Axes, active: Active, base: Row, strength: int) -> set[Tuple_]:
    """All combinations that some row can cover: those whose axes all matter when the rest is ``base``."""
    out = set()
    for names in combinations(sorted(axes), strength):
        for values in product(*(axes[name] for name in names)):
            pairs = tuple(zip(names, values, strict=True))
            if all(pair in active({**base, **dict(pairs)}).items() for pair in pairs):
                out.add(pairs)
    return out


def covering_array(axes: Axes, active: Active, base: Row, strength: int, seed: int, tries: int = 24) -> list[Row]:
    """Rows that together cover everything ``wanted``: greedy, the best of some random completions each time."""
    rng = random.Random(seed)
    missing = wanted(axes, active, base, strength)
    queue = sorted(missing)
    rng.shuffle(queue)
    rows = []
    for pairs in queue:
        if pairs not in missing:
            continue
        best, gain = dict(base), set[Tuple_]()
        for row in _completions(axes, active, base, pairs, rng, tries):
            new = covered(row, active, strength) & missing
            if len(new) > len(gain):
                best, gain = row, new
        rows.append(best)
        missing -= gain
    return rows


def _completions(axes: Axes, active: Active, base: Row, pairs: Tuple_, rng: random.Random, tries: int) -> Iterator[Row]:
    yield {**base, **dict(pairs)}
    for _ in range(tries):
        row = {name: rng.choice(values) for name, values in axes.items()} | dict(pairs)
        if all(pair in active(row).items() for pair in pairs):
            yield row


def sample(axes: Axes, count: int, seed: int) -> list[Row]:
    """``count`` random rows."""
    rng = random.Random(seed)
    return [{name: rng.choice(values) for name, values in axes.items()} for _ in range(count)]


def report(rows: Sequence[Row], axes: Axes, active: Active, base: Row) -> tuple[list[str], set[Tuple_]]:
    """Per axis one line of covered pairs, and the pairs that are missing."""
    every = wanted(axes, active, base, 2)
    missing = every - {pair for row in rows for pair in covered(row, active, 2)}
    lines = []
    for axis in axes:
        total = sum(any(name == axis for name, _ in pair) for pair in every)
        lost = sum(any(name == axis for name, _ in pair) for pair in missing)
        lines.append(f"{axis:10s} {len(axes[axis]):3d} values, {total - lost:4d} of {total:4d} pairs covered")
    lines.append(f"{'together':10s} {len(every) - len(missing):5d} of {len(every):5d} pairs in {len(rows)} cases")
    return lines, missing
