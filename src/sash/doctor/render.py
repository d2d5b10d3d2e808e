"""Findings for people: what is wrong in full, then a line for each check that is well. Loads no torch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from sash.doctor.finding import Finding, Status, exit_code
from sash.doctor.symptoms import CHECKS

_WRONG = (Status.WARN, Status.FAIL)
_MARKS = {Status.OK: "ok", Status.WARN: "WARN", Status.FAIL: "FAIL", Status.SKIPPED: "-"}
_WIDTH = 118


def as_text(findings: Sequence[Finding], what: str) -> str:
    """Both parts in the order of the checks, and one line that sums up."""
    lines = [f"sash doctor: {what}", ""]
    for finding in (f for f in findings if f.status in _WRONG):
        lines.append(f"{_MARKS[finding.status]} {finding.name}: {CHECKS[finding.name]}")
        for label in ("evidence", "cause", "fix"):
            if text := getattr(finding, label):
                lines += _folded(f"     {label:<9} ", text)
        lines.append("")
    rest = [f for f in findings if f.status not in _WRONG]
    wide = max((len(f.name) for f in rest), default=0)
    for finding in rest:
        lines += _folded(f"{_MARKS[finding.status]:<4} {finding.name:<{wide}}  ", finding.evidence)
    return "\n".join([*lines, *[""] * bool(rest), summary(findings)])


def summary(findings: Sequence[Finding]) -> str:
    """One line: how many checks found something, and the first of them."""
    wrong = [f.name for f in findings if f.status in _WRONG]
    looked = sum(f.status is not Status.SKIPPED for f in findings)
    if not looked:
        return "Nothing could be looked at here."
    checks = f"{looked} check{'s' * (looked != 1)}"
    if not wrong:
        return f"{checks}, nothing wrong."
    return f"{checks}, {len(wrong)} found something: {', '.join(wrong)}. Begin with the first."


def as_document(findings: Sequence[Finding], what: str) -> dict[str, object]:
    """For JSON: the subject, the exit code and the findings in their order."""
    shown = [{"question": CHECKS[f.name], **asdict(f)} for f in findings]
    return {"subject": what, "exit_code": exit_code(findings), "findings": shown}


def _folded(head: str, text: str) -> list[str]:
    lines = textwrap.wrap(text, _WIDTH - len(head), break_on_hyphens=False)
    return [head + lines[0], *(" " * len(head) + line for line in lines[1:])]
