"""A plan as a picture: memory of a request and operations of a token by context, under each design."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from sash.planner.compute import attention_flop, linear_flop
from sash.planner.designs import forms
from sash.planner.plan import Plan
from sash.spec.errors import ConfigError

# Colours that stay apart in print and for colour-blind readers.
_COLOURS = {"full": "#8d8d8d", "hybrid": "#d1495b", "pure window": "#30638e", "R-SWA": "#edae49"}
_LONGEST = 1 << 20


def draw(plan: Plan, file: Path) -> None:
    """Draw into ``file``; its ending names the format (svg, png, pdf).

    Raises:
        ConfigError: matplotlib isn't installed, or can't write there.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'sash-llm[bench]'") from error
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    memory, work = figure.subplots(1, 2)
    _memory(plan, memory)
    _work(plan, work)
    figure.suptitle(f"{plan.shapes.name}, {plan.layout.precision.describe()}")
    try:
        if not file.suffix or file.is_dir():  # matplotlib would write another file beside it
            raise ValueError("it has no ending that names a format")
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {file} can't be written ({error}); name a file such as plan.svg") from error


def lengths(plan: Plan) -> list[int]:
    """Powers of two from 256 to the model's longest context or the planned one, at most 2^20."""
    longest = min(max(plan.shapes.max_position, plan.answer.context, 4096), _LONGEST)
    return [n for n in (1 << i for i in range(8, 21)) if n <= longest]


def _memory(plan: Plan, axes: Any) -> None:
    answer = plan.answer.context - plan.answer.prompt
    for name, shapes in forms(plan.shapes).items():
        layout = replace(plan.layout, shapes=shapes)
        _line(axes, name, [(n, layout.held_bytes(n, max(n - answer, 1)) / 2**30) for n in lengths(plan)])
    axes.set_ylabel("GiB of K and V of a request")
    axes.set_title("memory")


def _work(plan: Plan, axes: Any) -> None:
    for name, shapes in forms(plan.shapes).items():
        _line(axes, name, [(n, attention_flop(shapes, n - 1, n) / 1e9) for n in lengths(plan)])
    if plan.shapes.weights is not None:
        axes.axhline(linear_flop(plan.shapes) / 1e9, color="black", linestyle=":", label="linear layers")
    axes.set_ylabel("10⁹ operations of attention for one token")
    axes.set_title("computation")
    axes.legend(frameon=False)


def _line(axes: Any, name: str, points: list[tuple[int, float]]) -> None:
    axes.plot(*zip(*points, strict=True), label=name, color=_COLOURS[name], marker="o", markersize=3)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens of context")
    axes.grid(alpha=0.3)
