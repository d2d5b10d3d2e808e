from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.jobs.memory import MEMORY

from sash.server.jobs import runner


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for a store."""
    path = Path(tempfile.mkdtemp(prefix="sash-jobs-", dir=MEMORY))
    yield path
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runners that look around often."""
    monkeypatch.setattr(runner, "_POLL_S", 0.002)
    monkeypatch.setattr(runner, "_TIDY_S", 0.01)
    monkeypatch.setattr(runner, "_STORE_PAUSE_S", 0.01)
    monkeypatch.setattr(runner, "_AFTER_DEATH_S", 0.01)
