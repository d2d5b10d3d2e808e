from __future__ import annotations

import pytest

from sash.cli.progress import Progress


def test_bars_on_a_terminal_only(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    progress("loading", 1, 2)
    progress.close()
    assert capsys.readouterr().err == ""


def test_bars_close_when_their_stage_ends() -> None:
    progress = Progress(visible=True)
    progress("loading", 1, 2)
    assert progress._bars is not None
    progress("loading", 2, 2)
    assert progress._bars is None
    progress("prompt", 100, 4000)
    progress.close()
    assert progress._bars is None
