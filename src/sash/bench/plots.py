"""Plots of benchmark records, as small SVG files that are the same bytes for the same records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sash.bench.render import PLOT_SOURCE, PLOTS, Record, Records
from sash.spec.errors import ConfigError

# sash first; colours that stay apart in print and for colour-blind readers.
_COLOURS = {
    "sash": "#d1495b",
    "llama.cpp": "#30638e",
    "openvino": "#edae49",
    "vllm": "#00798c",
    "transformers": "#8d8d8d",
}
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "sash", "font.family": "sans-serif", "font.size": 10}


def draw(kind: str, records: Records, model: str, file: Path) -> None:
    """Draw one plot into ``file``.

    Raises:
        ConfigError: matplotlib isn't installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("matplotlib is not installed: pip install 'sash-llm[bench]'") from error
    record = records[PLOT_SOURCE[kind], model]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        axes: Any = figure.add_subplot()
        lines = _memory(record) if kind == "memory" else _speed(record, kind)
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name, color=_COLOURS.get(name))
        axes.set_xscale("log", base=2)
        ticks = sorted({x for points in lines.values() for x, _ in points})
        axes.set_xticks(ticks, [f"{x:,}".replace(",", "\u202f") for x in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens")
        axes.set_ylabel("MiB" if kind == "memory" else "tokens per second")
        axes.set_title(f"{PLOTS[kind]}, {model}")
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside right upper", frameon=False)
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})


def _speed(record: Record, kind: str) -> dict[str, list[tuple[int, float]]]:
    """Tokens per second by prompt length, for sash and each peer."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for figure in record["figures"]:
        if figure.get("kind") == kind:
            for name, rate in {"sash": figure["sash"], **figure["peers"]}.items():
                lines.setdefault(name, []).append((figure["prompt"], rate["median"]))
    return lines


def _memory(record: Record) -> dict[str, list[tuple[int, float]]]:
    """MiB of pages by pool and length."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for entry in record["memory"]:
        for pool, size in entry["pool_bytes"].items():
            lines.setdefault(f"{pool} pool", []).append((entry["tokens"], size / 2**20))
    return lines
