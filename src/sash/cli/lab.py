"""``sash lab``: experiments with a report at the end."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from sash.cli.bench import threads, writable
from sash.cli.progress import Progress
from sash.cli.streams import log_to_stderr
from sash.spec.errors import ConfigError


def lab(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="EXPERIMENT… [MODEL]", help="What to run, or all; then the model, as for generate."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: all experiments in two minutes.")] = False,
    out: Annotated[Path, typer.Option(help="The folder for report.html, report.md and its plots.")] = Path("sash-lab"),
    record: Annotated[
        Path | None,
        typer.Option(
            help="Append a JSON line for each experiment. Default: lab.jsonl in that folder.", callback=writable
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="The text that models read. Default: Python's help topics.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Lengths in tokens to measure at, between commas.")] = None,
    windows: Annotated[str | None, typer.Option(help="Windows to try in window-sweep, between commas.")] = None,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
) -> None:
    """Show by measurement what windows do: run experiments and write a report. Without arguments: list them."""
    from sash.lab.catalogue import ENTRIES, chosen, groups

    if not words:
        for name, entry in ENTRIES.items():
            typer.echo(f"{name:16s} {entry.summary}")
        together = [name for name, members in groups().items() if len(members) > 1]
        typer.echo(f"\nseveral at once: {', '.join(together)}; such as sash lab all --quick")
        return
    names, model = chosen(words)
    read = _read(text)
    sizes = {name: _numbers(name, given) for name, given in (("--lengths", lengths), ("--windows", windows))}
    log_to_stderr(logging.WARNING)
    # libgomp reads it when torch loads; see sash.cli.engine.build.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    from sash.lab.context import Context
    from sash.lab.run import run

    progress = Progress()
    try:
        context = Context(
            model or "gemma3-270m",
            quick=quick,
            text=read,
            seed=seed,
            threads=threads(),
            report=progress,
            lengths=sizes["--lengths"],
            windows=sizes["--windows"],
        )
        run(names, context, out, record)
    finally:
        progress.close()


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    items = [item.strip() for item in (text or "").split(",") if item.strip()]
    if not all(item.isdecimal() and int(item) for item in items):
        raise ConfigError(f"{option} must be numbers of tokens between commas, such as 128,1024; got {text!r}")
    return tuple(sorted({int(item) for item in items}))


def _read(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path} can't be read as text ({error}); name a UTF-8 file") from error
    if not text.strip():
        raise ConfigError(f"--text {path} is empty; name a file with some pages of text, or leave it out")
    return text
