"""All experiments on the real hybrid model with small sizes, through the command, and the report at the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.real_models import real_model

from sash.lab.catalogue import ENTRIES

# Verdicts that rest on bytes, tokens and weights. The others rest on the clock too, and this machine may be busy.
CLOCKLESS = (
    *("edge", "against", "ring", "ring-long", "window-sweep", "reach-toy", "reach"),
    *("myth-mask", "myth-growth", "myth-facts", "memory", "batch", "ratio"),
)


@pytest.mark.e2e
@pytest.mark.real
@pytest.mark.timeout(1200)
def test_every_experiment_finds_something_and_the_report_has_it(tmp_path: Path) -> None:
    real_model("gemma3-270m")
    command = [sys.executable, "-m", "sash", "lab", "all", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    records = {r["name"]: r for r in map(json.loads, (tmp_path / "lab.jsonl").read_text().splitlines())}
    assert list(records) == list(ENTRIES)
    assert {name: records[name]["verdict"] for name in CLOCKLESS} == dict.fromkeys(CLOCKLESS, "holds")
    page = (tmp_path / "report.html").read_text()
    plots = [plot for record in records.values() for plot in record["plots"]]
    assert page.count("<svg") == len(plots) >= len(records)
    assert all(plot["x"]["unit"] and plot["y"]["unit"] and plot["reading"] for plot in plots)
    assert all((tmp_path / "plots" / f"{plot['name']}.svg").is_file() for plot in plots)
