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
_TIMES = 6.0


@dataclass(frozen=True, slots=True)
class Errors:
    """How far an answer's scores after each position are off the reference: [T]; NaN where none were given."""

    values: tuple[float, ...]

    def worst(self, start: int, end: int) -> tuple[float, int]:
        """The largest and its position; (0, -1) where there are none."""
        part = [(v, i) for i, v in enumerate(self.values[start:end], start) if not math.isnan(v)]
        return max(part, default=(0.0, -1))


def errors(reference: Reference, answer: Answer) -> Errors:
    """Per position, the largest difference among the best tokens' log-probabilities."""
    text = answer.text[: len(answer.scores)] if len(answer.scores) < len(answer.text) else answer.text
    if not text:
        return Errors(())
    wanted = reference.scores(text, len(answer.prompt))
    out = []
    for row, score in zip(wanted, answer.scores, strict=False):
        if score is None or not score.top_ids:
            out.append(math.nan)
            continue
        theirs = row[torch.tensor(score.top_ids, device=row.device)].cpu()
        ours = torch.tensor(score.top_logprobs)
        near = ours >= ours.max() - _DEPTH
        out.append(float((theirs - ours).abs()[near].max()) if near.any() else math.inf)  # none: they are no numbers
    return Errors(tuple(out))


def departs(found: Errors, start: int, end: int, floor: float) -> list[int]:
    """Positions whose scores are off by far more than ``floor``, an error that the engine makes by rounding alone.
    Single rows may be."""
    limit = _TIMES * max(floor, _LEAST)
    return [i for i in range(start, min(end, len(found.values))) if found.values[i] > limit]


def floor_of(several: Sequence[Errors], end: int) -> float:
    """The rounding error of the first ``end`` positions, where window and full attention are the same: a high one."""
    values = sorted(v for e in several for v in e.values[:end] if not math.isnan(v))
    return values[int(0.9 * (len(values) - 1))] if values else 0.0
