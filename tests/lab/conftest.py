"""A tiny hybrid model (window 5) and a context on it, loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.conftest import save_tokenizer
from tests.families import build

from sash.lab.context import Context

OPTIONS = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 22, "page_size": 4}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, folder = build("gemma3", tmp_path_factory.mktemp("lab"), max_position_embeddings=4096)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def context(folder: Path) -> Context:
    return Context(str(folder), quick=True, threads=1, options=OPTIONS)


@pytest.fixture(scope="session")
def full_context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    """A model without windows."""
    _, folder = build("llama", tmp_path_factory.mktemp("lab"))
    save_tokenizer(folder)
    return Context(str(folder), quick=True, threads=1, options=OPTIONS)
