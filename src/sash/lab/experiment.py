"""What an experiment is and what it finds, as plain data: a record holds it, and the report is drawn from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from sash.spec.errors import SashError

if TYPE_CHECKING:
    from sash.lab.context import Context

Point = tuple[float, float]


class Verdict(StrEnum):
    """What the figures say about an experiment's claim; computed, never written by hand."""

    HOLDS = "holds"
    FAILS = "does not hold"
    SKIPPED = "not measured"


class NotApplicable(SashError):
    """The experiment has nothing to measure on this model; the message says why."""


@dataclass(frozen=True, slots=True)
class Axis:
    """What is drawn along an axis. ``unit`` is never empty (a count's is what is counted); ``log`` 2 or 10 spaces
    powers of it evenly, 0 draws plain numbers."""

    label: str
    unit: str
    log: int = 0

    def __str__(self) -> str:
        return f"{self.label} [{self.unit}]"


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture.

    Args:
        name: of its file, unique in the report.
        title: what it shows, for people.
        x, y: axes with units.
        lines: label to its points.
        kind: "lines" draws points joined, "dots" draws points alone, "bars" draws one bar a label (its points' y).
        marks: x positions to mark with a dashed line, and what they are.
        ticks: x positions with a name each, instead of numbers.
        reading: one sentence, computed from the data.
    """

    name: str
    title: str
    x: Axis
    y: Axis
    lines: dict[str, list[Point]]
    kind: str = "lines"
    marks: tuple[tuple[float, str], ...] = ()
    ticks: tuple[tuple[float, str], ...] = ()
    reading: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one experiment found.

    Args:
        name: the experiment's.
        verdict: whether the experiment's claim holds for what was measured.
        sentence: the reading in one sentence, with the numbers it rests on.
        rows: the figures, one mapping of column to value each; all rows have the same columns.
        units: column to unit, for every column that holds numbers.
        plots: pictures of the rows, or of more than they hold.
        method: what was measured and how, with the sizes that were used.
    """

    name: str
    verdict: Verdict
    sentence: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    units: dict[str, str] = field(default_factory=dict)
    plots: list[Plot] = field(default_factory=list)
    method: str = ""

    def to_json(self) -> dict[str, Any]:
        """As a record has it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Experiment:
    """Something to measure.

    Args:
        name: as ``sash lab`` takes it.
        title: a question or a statement, for people.
        claim: what the verdict is about, in one sentence.
        explanation: what a reader needs to know first, in plain words; paragraphs apart by empty lines.
        run: measures it.
    """

    name: str
    title: str
    claim: str
    explanation: str
    run: Callable[[Context], Finding]


def thin(points: list[Point], most: int = 160) -> list[Point]:
    """At most so many of the points, evenly spaced, the first and the last among them."""
    if len(points) <= most:
        return points
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def finding_from_json(value: dict[str, Any]) -> Finding:
    """The inverse of ``Finding.to_json`` after a trip through JSON."""
    plots = [
        Plot(
            **{
                **plot,
                "x": Axis(**plot["x"]),
                "y": Axis(**plot["y"]),
                "lines": {label: [(x, y) for x, y in points] for label, points in plot["lines"].items()},
                **{name: tuple((x, label) for x, label in plot[name]) for name in ("marks", "ticks")},
            }
        )
        for plot in value["plots"]
    ]
    return Finding(**{**value, "verdict": Verdict(value["verdict"]), "plots": plots})


def holds(*conditions: bool) -> Verdict:
    """HOLDS where all conditions do."""
    return Verdict.HOLDS if all(conditions) else Verdict.FAILS
