"""Run experiments, keep a record of each, and write the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sash import __version__
from sash.bench.record import append_record, check_record, circumstances
from sash.lab.catalogue import load
from sash.lab.context import Context
from sash.lab.draw import check_drawing
from sash.lab.experiment import Experiment, Finding, NotApplicable, Verdict
from sash.lab.report import Result, write_report

RECORDS = "lab.jsonl"


def run(
    names: Sequence[str],
    context: Context,
    out: Path,
    record: Path | None = None,
    say: Callable[[str], None] = print,
) -> list[Result]:
    """Run experiments: ``record`` (or ``lab.jsonl`` in the folder ``out``) gets a line as each is done, then the report
    is written into the folder.

    What was found before something raised is in the report all the same.

    Raises:
        ConfigError: the folder can't be written, or matplotlib isn't installed.
        ModelError: the model can't be found or read.
    """
    check_drawing()
    if record is None:
        record = out / RECORDS
        check_record(record, "--out")
    else:
        check_record(record)
    torch.set_num_threads(context.threads)
    facts, experiments = _facts(context), [load(name) for name in names]
    results: list[Result] = []
    try:
        for experiment in context.track("experiments", experiments):
            results.append(measure(experiment, context))
            append_record(_record(results[-1], facts), record)
            finding = results[-1].finding
            say(_said(experiment, finding))
            unused = context.unused()
            if unused and finding.verdict is not Verdict.SKIPPED:
                say(f"{experiment.name} has sizes of its own: no effect of {' and '.join(unused)}")
    finally:
        if results:
            pages = write_report(results, facts, out)
            say(f"report: {' and '.join(map(str, pages))}")
    return results


def measure(experiment: Experiment, context: Context) -> Result:
    """One experiment; "not measured" where the model has nothing that it could show."""
    started = time.perf_counter()
    try:
        finding = experiment.run(context)
    except NotApplicable as reason:
        finding = Finding(experiment.name, Verdict.SKIPPED, str(reason))
    return Result(experiment, finding, time.perf_counter() - started)


def _said(experiment: Experiment, finding: Finding) -> str:
    verdict = "is not measured" if finding.verdict is Verdict.SKIPPED else finding.verdict.value
    return f'{experiment.name}: "{experiment.claim.removesuffix(".")}" {verdict}. {finding.sentence}'


def _facts(context: Context) -> dict[str, Any]:
    """What all records of a run say."""
    return {
        "command": "sash lab",
        "seed": context.seed,
        **circumstances(Path(__file__)),
        "model": context.model,
        "quick": context.quick,
        "threads": context.threads,
        "options": context.options,
        "versions": {"sash": __version__, "torch": torch.__version__},
    }


def _record(result: Result, facts: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = _rounded(result.finding.to_json())
    return {**facts, "seconds": round(result.seconds, 2), **found}


def _rounded(value: Any) -> Any:
    """Floats with six digits that count: more would be noise, in a file that is kept."""
    match value:
        case float():
            return float(f"{value:.6g}")
        case dict():
            return {key: _rounded(item) for key, item in value.items()}
        case list() | tuple():
            return [_rounded(item) for item in value]
    return value
