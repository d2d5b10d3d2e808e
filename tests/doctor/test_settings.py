"""What is told of a configuration without an engine."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.doctor.kinds import KINDS, options, wrong
from tests.equivalence.harness import MACHINE, tiny_spec

from sash.doctor.finding import Finding, Status
from sash.doctor.settings import PoolFacts, setting_findings, split_finding
from sash.spec.config import EngineConfig
from sash.spec.errors import ConfigError
from sash.spec.span import Span


def told(kind: str, **changes: object) -> dict[str, Finding]:
    spec = tiny_spec(KINDS[kind])
    return {f.name: f for f in setting_findings(spec, options(**changes).resolve(spec, MACHINE))}


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_well(kind: str) -> None:
    spec = tiny_spec(KINDS[kind])
    config = EngineConfig(dtype="float32").resolve(spec, MACHINE)
    assert wrong({f.name: f for f in setting_findings(spec, config)}) == []


@pytest.mark.parametrize("budget", [1 << 17, 1 << 18, 1 << 19, 1 << 20, 1 << 22])
@pytest.mark.parametrize("length", [32, 256, 1000])
@pytest.mark.parametrize("spans", [[5, 0], [5, 5, 5, 5, 5, 0], [200, 0], [900, 900, 0], [31, 0, 0, 0]], ids=str)
def test_the_computed_split_is_never_blamed(spans: list[int], length: int, budget: int) -> None:
    spec = tiny_spec([Span.sliding(w) if w else Span.full() for w in spans])
    try:
        config = options(max_model_len=length, kv_cache_memory_bytes=budget).resolve(spec, MACHINE)
    except ConfigError as error:
        assert "one request of max_model_len" in str(error)  # refused, so there is no split
        return
    assert {f.name: f for f in setting_findings(spec, config)}["pool-split"].status is Status.OK


def test_slopes_of_full_hybrid_and_pure() -> None:
    # 2 heads of 8, K and V, float32: 128 bytes a layer.
    assert "full attention: 0.38 KiB a token" in told("full")["memory-line"].evidence
    assert "hybrid: 0.12 KiB a token past the windows, 0.38 before" in told("hybrid")["memory-line"].evidence
    assert "pure windows: 0.00 KiB a token" in told("pure")["memory-line"].evidence


def test_a_budget_that_is_too_small_is_told_with_one_that_is_enough() -> None:
    spec = tiny_spec([Span.full()])
    small = options(max_model_len=None, kv_cache_memory_bytes=1 << 18)
    found = {f.name: f for f in setting_findings(spec, small.resolve(spec, MACHINE))}["length-limited"]
    assert found.status is Status.WARN and "shortened from 32768" in found.evidence
    enough = int(found.fix.rsplit(" ", 1)[1])
    config = options(max_model_len=None, kv_cache_memory_bytes=enough).resolve(spec, MACHINE)
    assert config.max_model_len == 32_768


def test_a_pool_that_nobody_can_use() -> None:
    pools = [PoolFacts("window", True, 900, 3, 10), PoolFacts("full", False, 30, 10, 10)]
    found = split_finding(pools, 40, 8, "--swa-full-tokens-ratio=1.0")
    assert found.status is Status.FAIL and "full pool is short" in found.cause
    assert found.fix == "leave --swa-full-tokens-ratio out, so that the split is computed"
    assert split_finding(pools, 40, 3).status is Status.OK


def test_pure_windows_tell_how_far_they_reach() -> None:
    assert "at most 18 tokens back" in told("pure")["reach"].evidence
    assert "1 of 3 layers see the whole text" in told("hybrid")["reach"].evidence


def test_loads_no_torch() -> None:
    parts = ["settings", "logs", "server", "symptoms", "render", "client", "statistics", "outside"]
    code = (
        f"import sys, sash.cli.doctor, {', '.join('sash.doctor.' + p for p in parts)}; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
