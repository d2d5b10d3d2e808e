"""Finding: what a check saw, why it is so, and the command that mends it. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """``warn`` works but costs something that can be had for less; ``fail`` is wrong or about to end."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check, named as in ``sash.doctor.symptoms.CHECKS``.

    Args:
        name: of the check.
        status: see ``Status``.
        evidence: what was seen, with its numbers; for ``skipped`` why nothing was looked at.
        cause: why it is so; empty where nothing is wrong.
        fix: a command or an option that mends it; empty where nothing is wrong.
    """

    name: str
    status: Status
    evidence: str
    cause: str = ""
    fix: str = ""


def ok(name: str, evidence: str) -> Finding:
    """Nothing is wrong."""
    return Finding(name, Status.OK, evidence)


def skipped(name: str, why: str) -> Finding:
    """Nothing could be seen."""
    return Finding(name, Status.SKIPPED, why)


def exit_code(findings: Iterable[Finding]) -> int:
    """0 where nothing is wrong, 1 where something is, 2 where nothing could be looked at."""
    seen = {f.status for f in findings} - {Status.SKIPPED}
    if not seen:
        return 2
    return int(seen != {Status.OK})
