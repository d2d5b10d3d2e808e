"""The file cache: damage, races and folders that can't be written."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sash.spec import files
from sash.text.cache import cached

DATA = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SASH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def never() -> bytes:
    raise AssertionError("built again")


def test_what_was_built_is_kept_by_key(folder: Path) -> None:
    assert cached("kind", "a", lambda: DATA) == DATA
    assert cached("kind", "a", never) == DATA
    assert cached("kind", "b", lambda: b"other") == b"other"
    assert sorted(p.name for p in folder.iterdir()) == ["kind-a", "kind-b"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: b"",
        lambda d: d[:20],
        lambda d: d[:-1],
        lambda d: d + b"x",
        lambda d: d[:100] + bytes((d[100] ^ 1,)) + d[101:],
        lambda d: b"X" + d[1:],
    ],
)
def test_a_damaged_file_is_built_again(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    cached("kind", "a", lambda: DATA)
    path = folder / "kind-a"
    path.write_bytes(damage(path.read_bytes()))
    assert cached("kind", "a", lambda: DATA[::-1]) == DATA[::-1]
    assert cached("kind", "a", never) == DATA[::-1]


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SASH_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert cached("kind", "a", lambda: DATA) == DATA
    assert "SASH_CACHE_DIR" in capsys.readouterr().err


def test_a_failed_write_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    assert cached("kind", "a", lambda: DATA) == DATA
    assert "No space left on device" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_writers_at_the_same_time_leave_a_whole_file(folder: Path) -> None:
    code = (
        "from sash.text.cache import cached; assert cached('kind', 'a', lambda: bytes(3_000_000)) == bytes(3_000_000)"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
    assert [p.wait() for p in processes] == [0] * 4
    assert cached("kind", "a", never) == bytes(3_000_000)
    assert [p.name for p in folder.iterdir()] == ["kind-a"]
