from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.scripted import Run

import sash
from sash.server.config import DEFAULT_TIMEOUT_S
from sash.spec.config import EngineConfig
from sash.spec.sampling import SamplingParams


def test_version(run: Run) -> None:
    assert run("--version").out == f"sash {sash.__version__}\n"


@pytest.mark.parametrize("command", ["generate", "chat", "inspect", "bench"])
def test_help_lists_the_command(run: Run, command: str) -> None:
    assert command in run("--help").out
    assert run(command, "--help").code == 0


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_tells_defaults_whole_names_and_no_value_of_a_switch(
    run: Run, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "…" not in run(command, "--help").out
    monkeypatch.setenv("COLUMNS", "160")
    text = run(command, "--help").out
    assert "<bool>" not in text
    lines = text.splitlines()
    for words in (
        ("--page-size", f"Default: {EngineConfig.__dataclass_fields__['page_size'].default}."),
        ("--dtype", "Default: auto."),
        ("--n ", f"Default: {SamplingParams().n}."),
        ("--top-p", "<float>"),
        ("--include-stop-str-in-output",),
        ("--help", "Show this message"),
    ):
        assert any(all(word in line for word in words) for line in lines), (words, text)
    for alias in ("--max-predict-length", "--max-total-num-tokens"):
        assert alias in text


def test_generate_s_help_ends_with_an_example(run: Run) -> None:
    assert "Example: sash generate gemma3-270m" in run("generate", "--help").out


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


@pytest.mark.parametrize("command", [["offline", "nowhere"], ["ops", "nowhere"]])
def test_a_record_that_can_not_be_kept_is_refused_before_the_work(run: Run, command: list[str], tmp_path: Path) -> None:
    done = run("bench", *command, "--record", str(tmp_path))
    assert done.code == 2 and f"--record: {tmp_path} can't be written" in done.err


def test_help_tells_after_how_long_a_server_ends_a_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    for command in ("serve", "generate"):
        assert f"Default: never; of sash serve: {DEFAULT_TIMEOUT_S:g}." in run(command, "--help").out
