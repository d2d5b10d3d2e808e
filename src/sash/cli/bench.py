"""``sash bench``: figures, with a record at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sash.spec.errors import ConfigError


def offline(
    model: Annotated[str, typer.Argument(help="As for generate.")] = "gemma3-270m",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, for both sides.")] = "bfloat16",
    against: Annotated[str, typer.Option(help="transformers, or none.")] = "transformers",
    lengths: Annotated[str, typer.Option(help="Prompt lengths, separated by commas.")] = "512,16384",
    repeats: Annotated[int, typer.Option(help="Alternating runs; medians are shown.", min=1)] = 3,
    memory: Annotated[str, typer.Option(help="Lengths for the memory lines; empty to skip.")] = "1000,32000",
    record: Annotated[Path | None, typer.Option(help="Append one JSON line to this file.")] = None,
) -> None:
    """Prefill and decode speed beside a peer, in alternating runs, and memory by length."""
    sizes, memory_sizes = _sizes("--lengths", lengths), _sizes("--memory", memory)
    if not sizes:
        raise ConfigError("--lengths must name at least one prompt length, such as 512")
    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("warning"))
    from sash.bench.offline import Plan, run
    from sash.bench.record import append_record

    plan = Plan(model, dtype, against, lengths=sizes, repeats=repeats, memory=memory_sizes)
    result = run(plan)
    if record is not None:
        append_record(result, record)


def _sizes(option: str, text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(item) for item in text.split(",") if item.strip())
    except ValueError:
        sizes = (0,)
    if any(n < 1 for n in sizes):
        raise ConfigError(
            f"{option} must be numbers of 1 or more, separated by commas, such as 512,16384; got {text!r}"
        )
    return sizes
