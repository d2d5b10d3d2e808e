"""Scores beside the dense reference: in the first window they tell the engine's own rounding, behind it the truth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sash.doctor.exam import Answer
from sash.doctor.reference import Reference

# Scores below the best one by more than this are mostly rounding.
_DEPTH = 12.0
# Rounding of 8-bit engines; a wrong mask or angle moves scores by more.
_LEAST = 1e-3
_TIMES, _TIMES_TYPICAL = 6.0, 3.0
# Of more rows than these some are compared: so many over the whole text, and so many at its end.
_SPREAD, _LAST = 96, 64
# Share of the rows that must be far off: single ones may be by rounding.
_MANY = 0.25


@dataclass(frozen=True, slots=True)
class Errors:
    """How far an answer's scores after each position are off the reference: [T]; NaN where none were given."""

    values: tuple[float, ...]

    @property
    def count(self) -> int:
        """Positions that have one."""
        return sum(not math.isnan(v) for v in self.values)

    def worst(self, start: int, end: int) -> tuple[float, int]:
        """The largest and its position; (0, -1) where there are none."""
        part = [(v, i) for i, v in enumerate(self.values[start:end], start) if not math.isnan(v)]
        return max(part, default=(0.0, -1))


# For some positions of an answer the log-probabilities of its best tokens there.
Scores = dict[int, torch.Tensor]


def dense(reference: Reference, answer: Answer) -> Scores:
    """The reference's scores of an answer; of many positions a selection. Empty where the answer has none."""
    best = {i: score.top_ids for i, score in enumerate(answer.scores) if score is not None and score.top_ids}
    rows = _selected(list(best))
    if not rows or answer.error:
        return {}
    text = answer.text[: len(answer.scores)]
    scores = reference.scores(text, len(answer.prompt), rows, [best[row] for row in rows])
    return dict(zip(rows, scores, strict=True))


def errors(answer: Answer, theirs: Scores) -> Errors:
    """Per position, the largest difference among the best tokens' log-probabilities."""
    if not theirs:
        return Errors((math.inf,))
    out = [math.nan] * len(answer.scores)
    for row, scores in theirs.items():
        score = answer.scores[row]
        assert score is not None
        ours = torch.tensor(score.top_logprobs)
        near = ours >= ours.max() - _DEPTH
        # None near: they are no numbers.
        out[row] = float((scores - ours).abs()[near].max()) if near.any() else math.inf
    return Errors(tuple(out))


def noise_of(plain: Scores, noisy: Scores) -> Errors:
    """What noise of the size of rounding does to the reference's own scores of an answer."""
    pairs = zip(plain.values(), noisy.values(), strict=True)
    return Errors(tuple(float((a - b).abs()[a >= a.max() - _DEPTH].max()) for a, b in pairs))


def _selected(rows: list[int]) -> list[int]:
    """Every so many of the rows, and all of the last ones."""
    step = max(len(rows) // _SPREAD, 1)
    return sorted({*rows[::step], *rows[-_LAST:]})


@dataclass(frozen=True, slots=True)
class Floor:
    """What an engine's rounding alone makes of scores: the error of a typical row, and of a bad one."""

    typical: float
    high: float


def floor_of(several: Sequence[Errors], end: int, noise: Errors) -> Floor:
    """From the first ``end`` positions, where a window and full attention are the same, and from what noise of the size
    of rounding does to a dense run: whichever is more."""
    parts = [[v for e in several for v in e.values[:end]], list(noise.values)]
    ordered = [sorted(v for v in part if not math.isnan(v)) or [0.0] for part in parts]
    return Floor(max(v[len(v) // 2] for v in ordered), max(v[int(0.9 * (len(v) - 1))] for v in ordered))


def departs(found: Errors, start: int, end: int, floor: Floor) -> list[int]:
    """Positions start … end - 1 whose scores are far off, if they are so many, or the typical one is so far off, that
    rounding can't have done it; else none."""
    rows = [i for i in range(start, min(end, len(found.values))) if not math.isnan(found.values[i])]
    far = [i for i in rows if found.values[i] > _TIMES * max(floor.high, _LEAST)]
    if len(far) > _MANY * len(rows):
        return far
    off = [i for i in rows if found.values[i] > _TIMES_TYPICAL * max(floor.typical, _LEAST)]
    return off if 2 * len(off) > len(rows) else []
