"""Which experiments a command line names, what is kept of them, and that the pages say it all."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.conftest import run as run
from tests.cli.scripted import Run

from sash.lab import run as running
from sash.lab.catalogue import ENTRIES, chosen, groups, load
from sash.lab.context import Context
from sash.lab.draw import draw, number
from sash.lab.experiment import Axis, Experiment, Finding, NotApplicable, Plot, Verdict, finding_from_json, thin
from sash.lab.report import Table, to_html
from sash.lab.story import BRIDGES
from sash.spec.errors import ConfigError

PLOT = Plot(
    "memory",
    "Memory by length",
    Axis("length", "tokens", 2),
    Axis("memory", "MiB"),
    {"ring": [(512.0, 1.5), (1024.0, 1.5)], "full": [(512.0, 1.5), (1024.0, 3.0)]},
    marks=((512.0, "W"),),
    reading="The ring stays at **1.5** MiB & `full` doubles.",
)
FINDING = Finding(
    "memory",
    Verdict.HOLDS,
    "The ring is flat: 1.5 MiB.",
    [{"storage": "ring", "held": 1.50001234567, "flat": True}, {"storage": "full", "held": None, "flat": False}],
    {"held": "MiB"},
    [PLOT],
    "Two lengths.",
)


def experiment(name: str, found: Finding | Exception) -> Experiment:
    def measured(_: Context) -> Finding:
        if isinstance(found, Exception):
            raise found
        return found

    return Experiment(name, f"About {name}", f"{name} holds.", "First.\n\nSecond <one>.", measured)


def test_every_experiment_is_there_under_its_name() -> None:
    for name in ENTRIES:
        it = load(name)
        assert it.name == name and it.title and it.claim.endswith(".") and it.explanation.strip()
    assert BRIDGES.keys() <= ENTRIES.keys()
    assert groups()["all"] == list(ENTRIES)


def test_words_name_experiments_and_perhaps_a_model() -> None:
    everything = list(ENTRIES)
    assert chosen(["all"]) == (everything, None)
    assert chosen(["edge", "all", "edge", "some-model"]) == (everything, "some-model")
    assert chosen(["edge"]) == (["edge"], None)
    for words, message in (
        (["egde", "some-model"], "no experiment is called 'egde'; did you mean edge"),
        (["some-model"], "'some-model' is no experiment; there are .*edge"),
    ):
        with pytest.raises(ConfigError, match=message):
            chosen(words)


def test_a_finding_survives_its_record() -> None:
    assert finding_from_json(json.loads(json.dumps(FINDING.to_json()))) == FINDING


def test_a_plot_names_its_units_and_lines_and_is_the_same_each_time() -> None:
    svg = draw(PLOT)
    for text in ("length [tokens]", "memory [MiB]", "Memory by length", "ring", "full", ">W<"):
        assert text in svg, text
    assert draw(PLOT) == svg
    assert "Second" in draw(
        Plot("b", "B", Axis("x", "case"), Axis("y", "s"), {"a": [(1, 2)]}, "bars", ticks=((1, "Second"),))
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (20_000, "20\u202f000"),
        (1234.5, "1\u202f234"),
        (0.6420, "0.642"),
        (12.345, "12.35"),
        (2.41e-4, "2.41e-04"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_a_run_keeps_records_and_writes_both_pages(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    them = {
        "memory": experiment("memory", FINDING),
        "skipped": experiment("skipped", NotApplicable("no windows here.")),
        "broken": experiment("broken", RuntimeError("out of luck")),
    }
    monkeypatch.setattr(running, "load", them.__getitem__)
    said: list[str] = []
    with pytest.raises(RuntimeError, match="out of luck"):
        running.run(["memory", "skipped", "broken"], context, tmp_path, say=said.append)
    records = [json.loads(line) for line in (tmp_path / "lab.jsonl").read_text().splitlines()]
    assert [(r["name"], r["verdict"]) for r in records] == [("memory", "holds"), ("skipped", "not measured")]
    assert records[0]["rows"][0]["held"] == 1.50001 and {"commit", "seed", "cpu", "seconds"} <= records[0].keys()
    assert said[:2] == [
        'memory: "memory holds" holds. The ring is flat: 1.5 MiB.',
        'skipped: "skipped holds" is not measured. no windows here.',
    ]
    markdown, page = ((tmp_path / f"report.{kind}").read_text() for kind in ("md", "html"))
    for text in (markdown, page):
        for wanted in (
            "1. About memory",
            "2. About skipped",
            "No windows here.",
            "First.",
            "held [MiB]",
            "Two lengths.",
        ):
            assert wanted in text, wanted
    assert "![Memory by length](plots/memory.svg)" in markdown and (tmp_path / "plots/memory.svg").is_file()
    assert "| ring | 1.5 | yes |" in markdown and "| full | – | no |" in markdown
    assert "<strong>1.5</strong> MiB &amp; <code>full</code>" in page and "Second &lt;one&gt;" in page
    # One file that needs nothing: pictures are in it, with ids of their own.
    assert page.count("<svg") == 1 and not re.search(r'(src|href)="(?!#)', page)
    assert set(re.findall(r'xlink:href="#([^"]+)"', page)) <= set(re.findall(r'id="([^"]+)"', page))


def test_long_tables_are_folded_and_long_lines_thinned() -> None:
    long = Table(("n",), tuple((str(i),) for i in range(13)))
    assert "<details><summary>13 rows of figures" in to_html([long], {})
    assert "<details>" not in to_html([Table(long.head, long.rows[:12])], {})
    points = [(float(i), 2.0 * i) for i in range(1000)]
    assert len(thin(points, 50)) == 50 and thin(points, 50)[0] == points[0] and thin(points, 50)[-1] == points[-1]
    assert thin(points[:50], 50) == points[:50]


def test_the_command_lists_and_refuses(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = run("lab")
    assert listed.code == 0 and all(name in listed.out for name in ENTRIES)
    assert "several at once: ring, reach, myths, batch, all" in listed.out
    (tmp_path / "empty").write_text(" \n")
    refused = run("lab", "edge", "--text", str(tmp_path / "empty"))
    assert refused.code == 2 and "is empty; name a file" in refused.err
    for option in ("--lengths", "--windows"):
        refused = run("lab", "edge", option, "128,none")
        assert refused.code == 2 and f"{option} must be numbers of tokens between commas" in refused.err
    refused = run("lab", "edge", "--record", str(tmp_path))
    assert refused.code == 2 and "can't be written" in refused.err
    refused = run("lab", "edge", "--out", str(tmp_path / "empty"))
    assert refused.code == 2 and "--out: " in refused.err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused = run("lab", "edge", "--out", str(tmp_path / "out"))
    assert refused.code == 2 and "pip install 'sash-llm[bench]'" in refused.err


def test_the_command_writes_a_report(run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "load", {"edge": experiment("edge", FINDING)}.__getitem__)
    record = tmp_path / "records" / "lab.jsonl"
    done = run("lab", "edge", str(folder), "--quick", "--out", str(tmp_path), "--record", str(record))
    assert json.loads(record.read_text())["verdict"] == "holds" and not (tmp_path / "lab.jsonl").exists()
    assert done.code == 0 and 'edge: "edge holds" holds.' in done.out and (tmp_path / "report.html").is_file()
    assert f"sash lab all {folder}" in (tmp_path / "report.md").read_text()
    assert "no effect" not in done.out


def test_sizes_without_effect_are_told(run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sized = experiment("ring", FINDING)
    sized = replace(sized, run=lambda context: (context.lengths_of((1,)), FINDING)[1])
    monkeypatch.setattr(running, "load", {"edge": experiment("edge", FINDING), "ring": sized}.__getitem__)
    monkeypatch.setattr("sash.lab.catalogue.ENTRIES", {name: ENTRIES[name] for name in ("edge", "ring")})
    sizes = ("--lengths", "64", "--windows", "16")
    done = run("lab", "edge", "ring", str(folder), *sizes, "--out", str(tmp_path))
    assert "edge has sizes of its own: no effect of --lengths and --windows\n" in done.out
    assert "ring has sizes of its own: no effect of --windows\n" in done.out
