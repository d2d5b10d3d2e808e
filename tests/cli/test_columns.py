from __future__ import annotations

import sys

import pytest

from sash.cli.columns import Page

ROWS = [("window", 52, "a rule that is rather long, and then some"), ("full", 10, "short")]


def page(monkeypatch: pytest.MonkeyPatch, columns: int | None) -> Page:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: columns is not None, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns or 80))
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Page()


def test_a_pipe_gets_whole_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = page(monkeypatch, None)
    out.table("Pools", ("pool", "layers", "rule"), ROWS, total=True)
    out.say("word " * 40)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "Pools"
    assert lines[4] == "window      52  a rule that is rather long, and then some"
    assert set(lines[3]) == set(lines[5]) == {"─"}
    assert lines[6] == "full        10  short"
    assert len(lines[7]) == 200


def test_a_terminal_gets_folded_cells(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = page(monkeypatch, 40)
    out.table("", ("pool", "layers", "rule"), ROWS)
    out.say(f"• {out.styled('do')}: " + "word " * 12, indent="  ")
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 48 for line in lines)  # the codes of ANSI's are 8 characters
    assert any(line.endswith("then some") for line in lines)
    assert lines[-1].startswith("  word")
    assert "\x1b[1mdo\x1b[0m" in "\n".join(lines)


def test_no_colour_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert Page().styled("text") == "text"
