"""Which table of ops runs, and what is refused."""

from __future__ import annotations

import pytest

from sash.ops.registry import resolve_ops
from sash.spec.errors import ConfigError


def test_names_lead_to_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SASH_KERNELS", raising=False)
    assert resolve_ops().name == resolve_ops(kernels="auto").name in ("native", "torch")
    assert resolve_ops(kernels="torch").name == "torch"
    assert resolve_ops(deterministic=True).name == "deterministic"
    monkeypatch.setenv("SASH_KERNELS", "reference")
    assert resolve_ops().name == "reference"
    monkeypatch.setenv("SASH_KERNELS", "")
    assert resolve_ops().name in ("native", "torch")


def test_what_cannot_work_is_refused_with_what_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"SASH_KERNELS='fast' is unknown; use auto, native or torch or reference"):
        resolve_ops(kernels="fast")
    monkeypatch.setenv("SASH_KERNELS", "reference")
    with pytest.raises(ConfigError, match=r"deterministic=True can't run .* use SASH_KERNELS=torch or auto"):
        resolve_ops(deterministic=True)
