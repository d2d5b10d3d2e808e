"""Closed, full and narrow standard streams, in real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def sash(shell_tail: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    """``python -m sash`` with arguments and redirections of a shell."""
    command = f'"$0" -m sash "$@" {shell_tail}'
    return subprocess.run(
        ["sh", "-c", command, sys.executable, *arguments], capture_output=True, check=False, env=os.environ | env
    )


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A config in a folder whose name no narrow encoding holds."""
    folder = tmp_path / "é😀"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder / "config.json")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_output_fits_any_encoding(model: str, encoding: str) -> None:
    shown = sash("", "inspect", model, PYTHONIOENCODING=encoding)
    assert shown.returncode == 0, shown.stderr
    found = sash("", "inspect", model, "--json", PYTHONIOENCODING=encoding)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout.decode(encoding))["path"] == model


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_a_full_disk_is_told_in_one_line(model: str, arguments: tuple[str, ...]) -> None:
    result = sash(">/dev/full", "inspect", model, *arguments)
    assert result.returncode == 1
    assert result.stderr.decode().splitlines() == [
        "sash: the output can't be written (no space left on the device): free some"
    ]


def test_closed_streams_are_no_defect(model: str) -> None:
    assert sash(">&-", "inspect", model).returncode == 0
    assert sash("2>&-", "inspect", model).returncode == 0
    empty = sash("<&-", "generate", model)
    assert empty.returncode == 2
    assert empty.stderr.startswith(b"sash: the prompt is empty")
