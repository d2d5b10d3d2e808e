from __future__ import annotations

import subprocess
import sys

import pytest
from tests.cli.scripted import Run

import sash


def test_version(run: Run) -> None:
    assert run("--version").out == f"sash {sash.__version__}\n"


@pytest.mark.parametrize("command", ["generate", "chat", "inspect", "bench"])
def test_help_lists_the_command(run: Run, command: str) -> None:
    assert command in run("--help").out
    assert run(command, "--help").code == 0


def test_unknown_command_exits_with_2(run: Run) -> None:
    assert run("sing").code == 2


def test_python_m_sash() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "sash", "inspect", "nothing-here"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert result.stderr.startswith("sash: no model at 'nothing-here'")


def test_closed_output_is_silent() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "sash", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        assert run.stdout and run.stderr
        run.stdout.close()
        assert run.stderr.read() == b""
