from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SASH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"
