"""Plots as SVG text: from a finding's data alone, the same bytes for the same data."""

from __future__ import annotations

import io
from typing import Any

from sash.lab.experiment import Axis, Plot
from sash.spec.errors import ConfigError

# Colours that stay apart in print and for colour-blind readers.
_COLOURS = (
    "#d1495b",
    "#30638e",
    "#edae49",
    "#00798c",
    "#8d8d8d",
    "#6a4c93",
    "#2e4057",
    "#c97b84",
    "#4f6d3a",
    "#b08968",
)
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "sash", "font.family": "sans-serif", "font.size": 10}
_TICKS_APART = 1.4  # times the one before, so that two numbers don't meet
_ALL_TICKS = 9  # points on an axis, each of which still gets its own number


def check_drawing() -> None:
    """Find out before the work whether plots can be drawn.

    Raises:
        ConfigError: matplotlib isn't installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("matplotlib is not installed: pip install 'sash-llm[bench]'") from error


def draw(plot: Plot) -> str:
    """The plot as an SVG element.

    Raises:
        ConfigError: matplotlib isn't installed.
    """
    check_drawing()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": plot.name}):
        figure = Figure(figsize=(7.2, 3.8), layout="constrained")
        axes: Any = figure.add_subplot()
        (_bars if plot.kind == "bars" else _curves)(axes, plot)
        axes.set_xlabel(str(plot.x))
        axes.set_ylabel(str(plot.y))
        axes.set_title(plot.title)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if len(plot.lines) > 1:
            figure.legend(loc="outside right upper", frameon=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _curves(axes: Any, plot: Plot) -> None:
    style = {"marker": "o", "markersize": 4, "linestyle": "" if plot.kind == "dots" else "-"}
    most = max(map(len, plot.lines.values()), default=0)
    if plot.kind == "lines" and most > 40:
        style["marker"] = ""
    for i, (label, points) in enumerate(plot.lines.items()):
        # Earlier lines are broader, so that one that lies below another can be seen.
        width = 1.5 + (3.0 * (len(plot.lines) - 1 - i) / len(plot.lines) if most <= 40 else 0)
        colour = _COLOURS[i % len(_COLOURS)]
        axes.plot(*zip(*points, strict=True), label=label, color=colour, linewidth=width, **style)
    for axis, name in ((plot.x, "x"), (plot.y, "y")):
        _scale(axes, axis, name)
    places = sorted({x for points in plot.lines.values() for x, _ in points})
    if plot.x.log == 2 and len(places) <= _ALL_TICKS:
        places = [x for i, x in enumerate(places) if i == len(places) - 1 or places[i + 1] / x > _TICKS_APART]
        axes.set_xticks(places, [number(x) for x in places])
        axes.minorticks_off()
    for x, label in plot.marks:
        axes.axvline(x, color="#444444", linewidth=1, linestyle="--")
        axes.annotate(label, (x, 1), xycoords=("data", "axes fraction"), xytext=(3, -10), textcoords="offset points")


def _scale(axes: Any, axis: Axis, name: str) -> None:
    """Powers as asked for; else plain numbers, from 0 where no value is below."""
    if axis.log:
        getattr(axes, f"set_{name}scale")("log", base=axis.log)
        if axis.log == 2:
            getattr(axes, f"{name}axis").set_major_formatter(lambda value, _: number(value))
    elif name == "x" and axis.unit in ("layers", "number"):
        axes.xaxis.get_major_locator().set_params(integer=True)
    elif name == "y" and axes.get_ylim()[0] >= -0.02 * axes.get_ylim()[1]:
        axes.set_ylim(bottom=0)


def _bars(axes: Any, plot: Plot) -> None:
    """A group of bars for each x, one bar for each label."""
    places = sorted({x for points in plot.lines.values() for x, _ in points})
    width = 0.8 / len(plot.lines)
    for i, (label, points) in enumerate(plot.lines.items()):
        where = [places.index(x) - 0.4 + (i + 0.5) * width for x, _ in points]
        axes.bar(where, [y for _, y in points], width, label=label, color=_COLOURS[i % len(_COLOURS)])
    named = dict(plot.ticks)
    axes.set_xticks(range(len(places)), [named.get(x, number(x)) for x in places])
    if plot.y.log:
        axes.set_yscale("log", base=plot.y.log)


def number(value: float) -> str:
    """A number for people: thousands apart by thin spaces, four digits that count."""
    if value == 0 or (float(value).is_integer() and abs(value) < 1e9):
        return f"{value:,.0f}".replace(",", "\u202f")
    if not 1e-3 <= abs(value) < 1e9:
        return f"{value:.2e}"
    return f"{value:,.0f}".replace(",", "\u202f") if abs(value) >= 1000 else f"{value:.4g}"
