"""Findings for people: what is wrong first in words, then what is well in a line each. Loads no torch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from sash.doctor.finding import Finding, Status, exit_code
from sash.doctor.symptoms import CHECKS

_MARKS = {Status.OK: "ok", Status.WARN: "WARN", Status.FAIL: "FAIL", Status.SKIPPED: "-"}
_WIDTH = 110


def as_text(findings: Sequence[Finding], what: str) -> str:
    """Checks in their order, each with its evidence; below them what is wrong, why, and what mends it."""
    lines = [f"sash doctor: {what}", ""]
    wide = max((len(f.name) for f in findings), default=0)
    for finding in findings:
        head = f"  {_MARKS[finding.status]:<5} {finding.name:<{wide}}  "
        lines += _folded(head, CHECKS[finding.name])
        lines += _folded(" " * len(head), finding.evidence)
        if finding.cause:
            lines += _folded(" " * len(head), f"cause: {finding.cause}")
        if finding.fix:
            lines += _folded(" " * len(head), f"fix: {finding.fix}")
    return "\n".join([*lines, "", summary(findings)])


def summary(findings: Sequence[Finding]) -> str:
    """One line: how many checks found something, and the first of them."""
    wrong = [f for f in findings if f.status in (Status.WARN, Status.FAIL)]
    looked = sum(f.status is not Status.SKIPPED for f in findings)
    if not wrong:
        return f"{looked} checks, nothing wrong."
    names = ", ".join(f.name for f in wrong)
    return f"{looked} checks, {len(wrong)} found something: {names}. Begin with the first."


def as_document(findings: Sequence[Finding], what: str) -> dict[str, object]:
    """For JSON: the subject, the exit code and the findings in their order."""
    shown = [{"question": CHECKS[f.name], **asdict(f)} for f in findings]
    return {"subject": what, "exit_code": exit_code(findings), "findings": shown}


def _folded(head: str, text: str) -> list[str]:
    lines = textwrap.wrap(text, max(_WIDTH - len(head), 40)) or [""]
    return [head + lines[0], *(" " * len(head) + line for line in lines[1:])]
