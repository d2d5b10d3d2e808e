"""The load report and its plots, from a record alone: the same bytes for the same record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sash.spec.errors import ConfigError

Record = Mapping[str, Any]
_COLOURS = {"sash": "#d1495b", "llama-server": "#30638e", "vllm": "#00798c"}
_POOLS = ("#d1495b", "#30638e", "#edae49", "#00798c")
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "sash", "font.family": "sans-serif", "font.size": 10}
_NAMES = {"ttft_ms": "first token", "tpot_ms": "per token", "itl_ms": "between tokens", "e2el_ms": "whole answer"}


def render(record: Record, folder: Path) -> list[Path]:
    """Write report.md and its plots; returns the files.

    Raises:
        ConfigError: matplotlib isn't installed.
    """
    plots = _draw(record, folder)
    page = folder / "report.md"
    page.write_text(report(record, [plot.name for plot in plots]), encoding="utf-8")
    return [page, *plots]


def report(record: Record, plots: Sequence[str]) -> str:
    """The page."""
    plan = record["plan"]
    parts = [
        "# sash's server under load",
        "Made by `make load`; every figure and plot is drawn from `record.json` beside this page.",
        _circumstances(record),
        "## Served against the engine alone",
        f"Closed loop of `vllm bench serve`: prompts of {plan['prompt']} random tokens, answers of {plan['output']}. "
        "The engine alone answers as many prompts, as many at a time, while the same generator drives a null server "
        "that replays what it saw before: all share the same cores.",
        _rates(record),
        _single(record),
        _idle(record),
        "## Latency",
        "Milliseconds, of all runs of `vllm bench serve` above: the median over the runs of each percentile.",
        _latency(record),
        "## Beside other servers",
        _others(record),
        "## Mixed lengths, and users who leave",
        f"locust: prompts of 20 to {plan['longest']} tokens, short ones more often, answers of up to "
        f"{min(plan['output'], 64)}; one of ten requests is left before its end. Closed loop: {plan['locust_users']} "
        f"users who ask again at once; open loop: {plan['locust_rate']:g} requests a second at random moments. "
        "Milliseconds, which locust rounds.",
        _locust(record),
        "## Pools over time",
        *(f"![{name}]({name})" for name in plots),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _circumstances(record: Record) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    changed = f" with {record['changed_files']} changed files" if record["changed_files"] else ""
    return "\n".join(
        [
            f"- {record['date']}, commit {record['commit']}{changed}",
            f"- {record['cpu']}, {record['cores']} cores; {record['plan']['threads']} threads compute",
            f"- {record['plan']['model']}; Python {record['python']}, {versions}",
            f"- medians of {record['plan']['repeats']} alternating runs, the least and the most beside them",
        ]
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _middle(values: Sequence[float]) -> float:
    ranked = sorted(values)
    half = len(ranked) // 2
    return ranked[half] if len(ranked) % 2 else (ranked[half - 1] + ranked[half]) / 2


def _rates(record: Record) -> str:
    rows = []
    for concurrency, found in record["rates"].items():
        served = _middle([run["served"]["output_rate"] for run in found["runs"]])
        alone = _middle([run["offline_rate"] for run in found["runs"]])
        low, high = found["ratio_range"]
        rows.append([concurrency, f"{served:.0f}", f"{alone:.0f}", f"{found['ratio']:.3f} ({low:.3f} to {high:.3f})"])
    return _table(["at a time", "served, tok/s", "engine alone, tok/s", "ratio"], rows)


def _single(record: Record) -> str:
    s = record["single"]
    first, token = s["first_ms"] - s["offline_first_ms"], s["token_ms"] - s["offline_token_ms"]
    rows = [
        ["first token, ms", f"{s['first_ms']:.1f}", f"{s['offline_first_ms']:.1f}", f"{first:+.1f}"],
        ["each further token, ms", f"{s['token_ms']:.2f}", f"{s['offline_token_ms']:.2f}", f"{token:+.2f}"],
    ]
    return _table(["one client, idle server", "served", "engine alone", "difference"], rows)


def _idle(record: Record) -> str:
    idle = record["idle"]
    return (
        f"{idle['clients']} further clients whose streams are open and wait: all seats together decode at "
        f"{idle['ratio']:.3f} of their rate without them."
    )


def _latency(record: Record) -> str:
    rows = []
    for concurrency, found in record["rates"].items():
        for metric, name in _NAMES.items():
            values = [[run["served"][metric][p] for run in found["runs"]] for p in ("p50", "p90", "p99")]
            rows.append([f"{name}, {concurrency} at a time", *(f"{_middle(v):.1f}" for v in values)])
    return _table(["", "p50", "p90", "p99"], rows)


def _others(record: Record) -> str:
    others = record["others"]
    rates = others["rates"]
    best = max((rate for name, rate in rates.items() if name != "sash"), default=None)
    rows = [
        [
            name,
            f"{rate:.0f}",
            sum(r.get("failed", 0) for r in others["runs"][name]),
            *(f"{_middle([r[m]['p50'] for r in others['runs'][name]]):.1f}" for m in _NAMES),
        ]
        for name, rate in rates.items()
    ]
    parts = [
        f"The same load at {others['concurrency']}, the servers in turn; milliseconds are medians."
        + (f" Measured on {others['date']}, commit {others['commit']}." if "date" in others else ""),
        _table(["server", "tok/s", "failed", *_NAMES.values()], rows),
    ]
    if best:
        parts.append(f"sash gives {rates['sash'] / best:.2f} times the tokens of the best other.")
    parts += [f"{name} is absent: {reason}" for name, reason in record["absent"].items()]
    return "\n\n".join(parts)


def _locust(record: Record) -> str:
    rows = [
        [f"{mode} loop, {name}", f["count"], f["failures"], *(f"{f['ms'].get(p, 0):g}" for p in ("p50", "p90", "p99"))]
        for mode, figures in record["locust"].items()
        for name, f in figures.items()
    ]
    return _table(["", "count", "failures", "p50", "p90", "p99"], rows)


def _draw(record: Record, folder: Path) -> list[Path]:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("matplotlib is not installed: pip install 'sash-llm[bench]'") from error
    files = []
    with matplotlib.rc_context(_STYLE):
        for mode, rows in record["pools"].items():
            if rows:
                figure = Figure(figsize=(7, 3.6), layout="constrained")
                _pools(figure, rows, f"{mode} loop: pages held, requests")
                files.append(_save(figure, folder / f"pools-{mode}.svg"))
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        _bars(figure, record["others"]["rates"], record["others"]["concurrency"])
        files.append(_save(figure, folder / "servers.svg"))
    return files


def _save(figure: Any, file: Path) -> Path:
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file


def _pools(figure: Any, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Share of each pool that is held over time; below, how many run and wait."""
    top, bottom = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    times = [row["at_s"] for row in rows]
    for colour, name in zip(_POOLS, rows[0]["pools"], strict=False):
        share = [100 * row["pools"][name]["held"] / row["pools"][name]["total"] for row in rows]
        top.plot(times, share, label=f"{name} pool", color=colour)
    for name, colour in (("running", "#444444"), ("waiting", "#edae49")):
        bottom.step(times, [row[name] for row in rows], where="post", label=name, color=colour)
    top.set_ylim(0, 100)
    top.set_ylabel("% of pages held")
    bottom.set_ylim(bottom=0)
    bottom.set_ylabel("requests")
    bottom.set_xlabel("seconds")
    top.set_title(title)
    for axes in (top, bottom):
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper right")


def _bars(figure: Any, rates: Mapping[str, float], concurrency: int) -> None:
    axes = figure.add_subplot()
    names = list(rates)
    bars = axes.barh(names, [rates[name] for name in names], color=[_COLOURS.get(name, "#8d8d8d") for name in names])
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.invert_yaxis()
    axes.set_xlabel("output tokens per second")
    axes.set_title(f"servers, {concurrency} requests at a time")
    axes.spines[["top", "right"]].set_visible(False)
