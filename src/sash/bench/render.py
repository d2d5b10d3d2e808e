"""``sash bench render``: docs/benchmarks.md from a template and the newest records.

A template's line ``{{ peers MODEL }}`` (or ``offline``, ``ops``) becomes that command's newest record for the model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sash.spec.errors import ConfigError

Record = dict[str, Any]
# By command and model.
Records = dict[tuple[str, str], Record]

_BLOCK = re.compile(r"^\{\{ (\w+) (\S+) \}\}$", re.MULTILINE)
PLOTS = {"decode": "Decode speed by context", "prefill": "Prefill speed by length", "memory": "Memory by length"}


def write_page(records: Path, template: Path, page: Path, plots: Path) -> None:
    """Write the page and draw its plots.

    Raises:
        ConfigError: a file can't be read or written, the template asks for something unknown, or matplotlib is missing.
    """
    newest = read_records(records)
    text = page_text(_read(template), newest, os.path.relpath(plots, page.parent))
    from sash.bench.plots import draw

    try:
        plots.mkdir(parents=True, exist_ok=True)
        for kind, model in wanted_plots(newest):
            draw(kind, newest, model, plots / plot_name(kind, model))
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename or page} can't be written: {error.strerror}") from error


def read_records(path: Path) -> Records:
    """The newest record of each command and model; records of earlier forms are passed over.

    Raises:
        ConfigError: the file can't be read, or a line isn't a record.
    """
    out: Records = {}
    for number, line in enumerate(_read(path).splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}:{number} is not a JSON line ({error}): repair or remove it") from error
        try:
            if "peer" not in record["figures"][0]:
                out[record["command"].removeprefix("sash bench "), record["model"]] = record
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ConfigError(f"{path}:{number} is no record of sash bench: remove the line") from error
    return out


def page_text(template: str, records: Records, plots: str) -> str:
    """The template with its tables filled in; ``plots`` is the plots' folder as the page sees it.

    Raises:
        ConfigError: a table of an unknown kind.
    """

    def block(match: re.Match[str]) -> str:
        kind, model = match.groups()
        if kind not in _TABLES:
            raise ConfigError(f"the template asks for {kind!r}; use {', '.join(_TABLES)}")
        record = records.get((kind, model))
        if record is None:
            return f"Not measured yet: `sash bench {kind}`."
        pictures = [
            f"![{PLOTS[name]}]({plots}/{plot_name(name, model)})"
            for name, of in wanted_plots(records)
            if of == model and PLOT_SOURCE[name] == kind
        ]
        return "\n".join([*_circumstances(record), "", *_TABLES[kind](record), *(["", *pictures] if pictures else [])])

    return _BLOCK.sub(block, template)


PLOT_SOURCE = {"decode": "peers", "prefill": "peers", "memory": "offline"}


def wanted_plots(records: Records) -> list[tuple[str, str]]:
    """Kinds and models of the plots that records have two points or more for."""
    out = []
    for (command, model), record in records.items():
        for kind, source in PLOT_SOURCE.items():
            points = (
                record.get("memory", [])
                if kind == "memory"
                else [f for f in record["figures"] if f.get("kind") == kind]
            )
            if command == source and len(points) > 1:
                out.append((kind, model))
    return out


def plot_name(kind: str, model: str) -> str:
    """File name of a plot."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", f"{model}-{kind}") + ".svg"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Lines of a Markdown table."""
    cells = list(head)
    return [f"| {' | '.join(row)} |" for row in (cells, ["---"] * len(cells), *rows)]


def _circumstances(record: Record) -> list[str]:
    engines = record.get("engines") or {"sash": {"version": record.get("versions", {}).get("sash", "")}}
    versions = ", ".join(f"{name} {engine['version']}".strip() for name, engine in engines.items())
    runs = f"; runs of a case: {record['repeats']}" if "repeats" in record else ""
    top = record["ceiling"]
    products = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in top["gemm_op_per_s"].items())
    return [
        f"{record['date'][:10]}, commit {record['commit']}; {record['cpu']}, {record['cores']} cores, "
        f"{record['threads']} threads; Python {record['python']}; {versions}{runs}. Ceilings: memory "
        f"{top['read_bytes_per_s'] / 1e9:.0f} GB/s; large products in GFLOP/s: {products}."
    ]


def _peers(record: Record) -> list[str]:
    names = [name for name in record["engines"] if name != "sash"]
    rows = []
    for figure in record["figures"]:
        found = figure["peers"]
        ratio = f"**{figure['ratio']:.2f}** ({figure['best_peer']})" if "ratio" in figure else ""
        cells = [_rate(figure["sash"]), *(_rate(found[name]) if name in found else "–" for name in names)]
        rows.append([figure["name"], *cells, ratio, *_ceiling(figure)])
    lines = table(["tokens per second", "sash", *names, "ratio to the best", "ceiling", "of it"], rows)
    perplexity = ", ".join(f"{name} {value:.3f}" for name, value in record["perplexity"].items())
    lines += ["", f"Perplexity of the same 1024 tokens: {perplexity}."]
    lines += [f"\nAbsent: {name} ({reason})." for name, reason in record["absent"].items()]
    return lines


def _offline(record: Record) -> list[str]:
    lines = table(
        ["tokens per second", "sash", "ceiling", "of it"],
        [[figure["name"], _rate(figure["sash"]), *_ceiling(figure)] for figure in record["figures"]],
    )
    if "perplexity" in record:
        found = record["perplexity"].items()
        lines += ["", *table(["tokens", "perplexity"], [[n, f"{value:.4f}"] for n, value in found])]
    if "token_s" in record:
        found = record["token_s"].items()
        lines += ["", *table(["context", "ms per token"], [[n, f"{1e3 * value:.2f}"] for n, value in found])]
    if "memory" in record:
        pools = list(record["memory"][0]["pool_bytes"])
        rows = [
            [
                str(entry["tokens"]),
                *(f"{entry['pool_bytes'][pool] / 2**20:.2f} MiB" for pool in pools),
                f"{entry['resident_bytes'] / 1e6:.0f} MB",
            ]
            for entry in record["memory"]
        ]
        lines += ["", *table(["tokens", *(f"{pool} pool" for pool in pools), "process, mapped files included"], rows)]
    if "first_token_s" in record:
        starts = ", ".join(f"{value:.2f}" for value in record["first_token_s"])
        lines += ["", f"From the command to its first token, start by start: {starts} s."]
    return lines


def _ops(record: Record) -> list[str]:
    rows = [
        [
            figure["name"],
            f"{1e6 * figure['seconds']:.1f}",
            f"{figure['per_s'] / 1e9:.1f} {figure['unit']}",
            f"{figure['ceiling_per_s'] / 1e9:.0f}",
            f"{100 * figure['per_s'] / figure['ceiling_per_s']:.0f} %",
        ]
        for figure in record["figures"]
    ]
    lines = table([f"{record['dtype']}, {record['kernels']}", "µs", "rate", "ceiling", "of it"], rows)
    for name, ratio in record["growth"].items():
        lines += [
            "",
            f"A decoding row after 30 000 tokens takes {ratio:.2f} × the time of one after 1000 in {name} layers.",
        ]
    return lines


_TABLES: dict[str, Callable[[Record], list[str]]] = {"peers": _peers, "offline": _offline, "ops": _ops}


def _rate(rate: Record) -> str:
    """Median, and half the distance of the extremes as a share of it."""
    median = rate["median"]
    digits = 0 if median >= 100 else 1
    spread = f" ±{50 * (rate['high'] - rate['low']) / median:.0f} %" if rate["runs"] > 1 else ""
    return f"{median:.{digits}f}{spread}"


def _ceiling(figure: Record) -> list[str]:
    return [f"{figure['ceiling']:.0f}", f"{100 * figure['sash']['median'] / figure['ceiling']:.0f} %"]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read ({error.strerror}): run this in the checkout, or name the file"
        ) from error
