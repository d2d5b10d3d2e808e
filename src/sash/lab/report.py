"""The report: one list of blocks, as Markdown with plots beside it and as one HTML file that needs nothing else."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sash.lab.draw import draw, number
from sash.lab.experiment import Experiment, Finding, Plot, Verdict
from sash.lab.story import BRIDGES, GLOSSARY, INTRODUCTION, RULES

_TITLE = "What a window does: the experiments of sash"
_MARKS = {Verdict.HOLDS: "✓", Verdict.FAILS: "✗", Verdict.SKIPPED: "–"}
_SHORT_TABLE = 12  # rows that are shown without being asked for
_STYLE = """
body { font: 17px/1.6 system-ui, sans-serif; color: #222; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.25; } h2 { margin-top: 3rem; border-top: 1px solid #ddd; padding-top: 1.5rem; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; font-size: 0.85rem; }
th, td { border-bottom: 1px solid #ddd; padding: 0.25rem 0.7rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } td:only-child { white-space: normal; }
table.words td, table.words th { text-align: left; white-space: normal; }
figure { margin: 1.5rem 0; } figure svg { width: 100%; height: auto; background: #fff; }
figcaption { font-size: 0.95rem; color: #444; } code { background: #f3f3f3; padding: 0 0.2em; border-radius: 3px; }
.verdict { background: #f6f6f2; border-left: 4px solid #00798c; padding: 0.6rem 1rem; }
.verdict.fails { border-color: #d1495b; }
.verdict.skipped { border-color: #8d8d8d; } .method { color: #555; font-size: 0.92rem; }
"""


@dataclass(frozen=True, slots=True)
class Result:
    """One experiment with what it found, and how long that took."""

    experiment: Experiment
    finding: Finding
    seconds: float


@dataclass(frozen=True, slots=True)
class Heading:
    level: int
    text: str
    anchor: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; ``code``, *italics* and **bold** are the only marks in it. ``role`` is a class of the HTML."""

    text: str
    role: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    role: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    plot: Plot


Block = Heading | Text | Table | Picture


def write_report(results: Sequence[Result], circumstances: dict[str, Any], out: Path) -> tuple[Path, Path]:
    """Write ``report.md``, its ``plots`` and ``report.html`` into a folder; returns the two pages."""
    blocks = list(compose(results, circumstances))
    pictures = {block.plot.name: draw(block.plot) for block in blocks if isinstance(block, Picture)}
    plots = out / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    for name, svg in pictures.items():
        (plots / f"{name}.svg").write_text(svg, encoding="utf-8")
    markdown, page = out / "report.md", out / "report.html"
    markdown.write_text(to_markdown(blocks), encoding="utf-8")
    page.write_text(to_html(blocks, pictures), encoding="utf-8")
    return markdown, page


def compose(results: Sequence[Result], circumstances: dict[str, Any]) -> Iterator[Block]:
    """The whole report, in order."""
    yield Heading(1, _TITLE)
    yield from paragraphs(INTRODUCTION)
    yield from paragraphs(RULES)
    yield Heading(2, "What was found")
    yield Text(_measured_on(circumstances), "method")
    yield Table(
        ("experiment", "claim", "verdict"),
        tuple(
            (r.experiment.title, r.experiment.claim, f"{_MARKS[r.finding.verdict]} {r.finding.verdict.value}")
            for r in results
        ),
        "words",
    )
    for i, result in enumerate(results, 1):
        yield from _chapter(i, result)
    yield Heading(2, "Words")
    yield Table(("word", "meaning"), GLOSSARY, "words")
    yield Heading(2, "How to repeat it")
    yield from paragraphs(_repeat(circumstances))


def _chapter(index: int, result: Result) -> Iterator[Block]:
    experiment, finding = result.experiment, result.finding
    yield Heading(2, f"{index}. {experiment.title}", experiment.name)
    yield from paragraphs(BRIDGES.get(experiment.name, ""))
    yield from paragraphs(experiment.explanation)
    yield Text(f"**Claim:** {experiment.claim}")
    roles = {Verdict.HOLDS: "verdict", Verdict.FAILS: "verdict fails", Verdict.SKIPPED: "verdict skipped"}
    mark = _MARKS[finding.verdict]
    yield Text(
        f"**{mark} {finding.verdict.value.capitalize()}.** {finding.sentence[:1].upper()}{finding.sentence[1:]}",
        roles[finding.verdict],
    )
    for plot in finding.plots:
        yield Picture(plot)
    if finding.rows:
        yield _figures(finding)
    if finding.method:
        yield Text(f"How it was measured: {finding.method} It took {result.seconds:.0f} s.", "method")


def _figures(finding: Finding) -> Table:
    """The rows, with units in the head."""
    columns = list(finding.rows[0])
    head = tuple(f"{c} [{finding.units[c]}]" if c in finding.units else c for c in columns)
    return Table(head, tuple(tuple(_cell(row[c]) for c in columns) for row in finding.rows))


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if isinstance(value, (int, float)) else str(value)


def paragraphs(text: str) -> Iterator[Text]:
    """Texts apart by empty lines, each as one paragraph."""
    for part in re.split(r"\n\s*\n", text.strip()):
        if part:
            yield Text(" ".join(part.split()))


def _measured_on(facts: dict[str, Any]) -> str:
    return (
        f"Measured with sash {facts['versions']['sash']} (commit {facts['commit']}) on {facts['date'][:10]}: model "
        f"{facts['model']}, {facts['cpu']}, {facts['threads']} threads, "
        f"{'small sizes (--quick)' if facts['quick'] else 'full sizes'}. Every verdict and every sentence beside a "
        "plot is computed from the figures of this run."
    )


def _repeat(facts: dict[str, Any]) -> str:
    return (
        f"`pip install 'sash-llm[bench,demo]'`, then `sash lab all {facts['model']}` writes this report and "
        "`lab.jsonl`, which has every figure of it. `--quick` does the same with small sizes in about two minutes, "
        "`--text FILE` reads another text, and `sash lab` lists the experiments that can be run alone."
    )


# ------------------------------------------------------------------------------------------- Markdown


def to_markdown(blocks: Iterable[Block]) -> str:
    """The report as Markdown; pictures lie in ``plots``."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {text}"
        case Text(text, role):
            return f"> {text}" if role.startswith("verdict") else f"*{text}*" if role == "method" else text
        case Picture(plot):
            return f"![{plot.title}](plots/{plot.name}.svg)\n\n*{plot.reading}*"
        case Table(head, rows, role):
            rule = ["---"] + ["---" if role == "words" else "---:"] * (len(head) - 1)
            lines = [head, rule, *rows]
            return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


# ----------------------------------------------------------------------------------------------- HTML


def to_html(blocks: Sequence[Block], pictures: dict[str, str]) -> str:
    """The report as one file: style and pictures are in it."""
    body = "\n".join(_html(block, pictures) for block in blocks)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{html.escape(_TITLE)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _html(block: Block, pictures: dict[str, str]) -> str:
    match block:
        case Heading(level, text, anchor):
            return f"<h{level}" + (f' id="{anchor}"' if anchor else "") + f">{html.escape(text)}</h{level}>"
        case Text(text, role):
            return "<p" + (f' class="{role}"' if role else "") + f">{_inline(text)}</p>"
        case Picture(plot):
            svg = _apart(pictures[plot.name], plot.name)
            return f"<figure>{svg}<figcaption>{_inline(plot.reading)}</figcaption></figure>"
        case Table(head, rows, role):
            lines = [("th", head), *(("td", row) for row in rows)]
            body = "\n".join("<tr>" + "".join(f"<{t}>{_inline(c)}</{t}>" for c in row) + "</tr>" for t, row in lines)
            table = "<table" + (f' class="{role}"' if role else "") + f">\n{body}\n</table>"
            if len(rows) <= _SHORT_TABLE:
                return table
            return f"<details><summary>{len(rows)} rows of figures</summary>\n{table}\n</details>"


def _inline(text: str) -> str:
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
    text = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
    return re.sub(r"\*(\w[^*]*)\*", r"<em>\1</em>", text)


def _apart(svg: str, name: str) -> str:
    """Ids of its own: several pictures stand in one page."""
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    return re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", svg)
