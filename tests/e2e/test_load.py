"""The load report as one command makes it, in short."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.real_models import real_model

pytestmark = [pytest.mark.real, pytest.mark.e2e, pytest.mark.timeout(3600)]
RUN = Path(__file__).parents[2] / "deploy" / "load" / "run.py"


def test_one_command_makes_the_report(tmp_path: Path) -> None:
    real_model("gemma3-270m")
    command = [sys.executable, str(RUN), "--quick", "--others", "none", "--out", str(tmp_path)]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["rates"]["2"]["ratio"] > 0 and record["locust"]["closed"]["whole"]["count"] > 0
    assert record["pools"]["closed"], "nothing was sampled"
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"record.json", "report.md", "servers.svg", "pools-closed.svg", "pools-open.svg"}
    assert "engine alone" in (tmp_path / "report.md").read_text()
