"""``sash bench``: figures, with a record at the end."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sash.cli.streams import log_to_stderr
from sash.spec.errors import ConfigError


def writable(record: Path | None) -> Path | None:
    from sash.bench.record import check_record

    if record is not None:
        check_record(record)
    return record


Record = Annotated[Path | None, typer.Option(help="Append one JSON line to this file.", callback=writable)]
Model = Annotated[str, typer.Argument(help="As for generate.")]
Cases = Annotated[
    str | None,
    typer.Option(help="Prompt lengths (512), and requests x tokens (8x256), between commas. Default: by the model."),
]
Repeats = Annotated[int, typer.Option(help="Runs of each case; medians are shown.", min=1)]
EngineOption = Annotated[
    list[str] | None, typer.Option("--engine-option", help="NAME=VALUE, an option of sash's engine; repeatable.")
]
Quick = Annotated[bool, typer.Option("--quick", help="One run of short cases: does everything work?")]


def offline(
    model: Model = "gemma3-270m",
    cases: Cases = None,
    repeats: Repeats = 3,
    engine_option: EngineOption = None,
    speed_only: Annotated[
        bool, typer.Option("--speed-only", help="No perplexity, memory, contexts and starts.")
    ] = False,
    quick: Quick = False,
    record: Record = None,
) -> None:
    """Sash alone: speed beside the machine's ceilings, perplexity, memory, time to the first token."""
    log_to_stderr(logging.WARNING)
    from sash.bench.offline import Plan, run

    plan = Plan(
        model,
        _cases(model, cases, quick),
        1 if quick else repeats,
        threads(),
        _options(engine_option),
        own="none" if speed_only else "short" if quick else "all",
    )
    _keep(run(plan), record)


def peers(
    model: Annotated[str, typer.Option(help="As for generate.")] = "gemma3-270m",
    peers: Annotated[str, typer.Option(help="Peers between commas, or none.")] = "llama.cpp,openvino,vllm,transformers",
    cases: Cases = None,
    repeats: Repeats = 3,
    engine_option: EngineOption = None,
    env_dir: Annotated[
        Path | None, typer.Option(help="Where the peers' environments are kept. Default: peers in sash's cache folder.")
    ] = None,
    quick: Quick = False,
    record: Record = None,
) -> None:
    """Sash and other engines in turn, each in an environment of its own, made the first time."""
    log_to_stderr(logging.WARNING)
    # Asked to end, it ends its workers first: they are asleep and wouldn't notice.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    from sash.bench.peers.catalogue import chosen
    from sash.bench.peers.compare import Plan, run
    from sash.spec.locate import cache_dir

    plan = Plan(
        model,
        tuple(chosen(peers)),
        _cases(model, cases, quick),
        1 if quick else repeats,
        threads(),
        _options(engine_option),
    )
    _keep(run(plan, (env_dir or cache_dir() / "peers").expanduser().absolute()), record)


def ops(
    model: Annotated[str, typer.Argument(help="Whose shapes to take; as for generate.")] = "gemma3-270m",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    only: Annotated[str, typer.Option(help="Cases whose name contains this text.")] = "",
    record: Record = None,
) -> None:
    """Time single ops, beside what memory and products allow."""
    log_to_stderr(logging.WARNING)
    from sash.bench.ops import run

    _keep(run(model, dtype, only, threads()), record)


def render(
    records: Annotated[Path, typer.Option(help="Records to read.")] = Path("docs/records/bench.jsonl"),
    template: Annotated[Path, typer.Option(help="The page's text, with places for tables.")] = Path(
        "docs/benchmarks.md.in"
    ),
    page: Annotated[Path, typer.Option(help="The page to write.")] = Path("docs/benchmarks.md"),
    plots: Annotated[Path, typer.Option(help="The folder for its plots.")] = Path("docs/plots"),
) -> None:
    """Write the page of benchmarks from records."""
    from sash.bench.render import write_page

    write_page(records, template, page, plots)


def _keep(result: dict[str, Any], record: Path | None) -> None:
    from sash.bench.record import append_record

    if record is not None:
        append_record(result, record)


def _cases(model: str, text: str | None, quick: bool) -> tuple[Any, ...]:
    from sash.bench.cases import DEFAULT_CASES, QUICK_CASES, USUAL_CASES, parse_cases

    return parse_cases(text or (QUICK_CASES if quick else DEFAULT_CASES.get(model, USUAL_CASES)))


def threads() -> int:
    """Threads of every engine: OMP_NUM_THREADS, or the cores, at most two."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given and (not given.isdecimal() or int(given) < 1):
        raise ConfigError(f"OMP_NUM_THREADS={given!r} must be a number of threads, such as 2, or left out")
    return int(given or min(2, os.cpu_count() or 1))


def _options(items: list[str] | None) -> dict[str, Any]:
    """``NAME=VALUE`` items; a value that reads as JSON is that number or truth value, any other a text."""
    out: dict[str, Any] = {}
    for item in items or []:
        name, equals, text = item.partition("=")
        if not name or not equals:
            raise ConfigError(f"--engine-option must be NAME=VALUE, such as page_size=32; got {item!r}")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        out[name.replace("-", "_")] = value
    return out
