"""Tiny random models of every kind, and what doctor finds on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.equivalence.harness import MACHINE, random_weights, tiny_spec
from tests.families import build

from sash.doctor.engine import diagnose, examine_model
from sash.doctor.finding import Finding, Status
from sash.engine.build import assemble
from sash.engine.core import EngineCore
from sash.spec.config import EngineConfig
from sash.spec.model import ModelSpec
from sash.spec.span import Span, SpanKind

KINDS: dict[str, Sequence[Span]] = {
    "pure": [Span.sliding(7)] * 3,
    "hybrid": [Span.sliding(7), Span.sliding(7), Span.full()],
    "full first": [Span.full(), Span.sliding(7)],
    "full": [Span.full()] * 3,
    "chunked": [Span.chunked(8), Span.full(), Span.chunked(8)],
    "sinks": [Span.sliding(7, 3), Span.full()],
    "two windows": [Span.sliding(5), Span.sliding(11), Span.full()],
    "reference": [Span(SpanKind.REFERENCE, 6)] * 2,
    "window in prefill": [Span(SpanKind.PREFILL_WINDOW, 6)] * 2,
    "window of one": [Span.sliding(1), Span.full()],
}
OPTIONS = {"dtype": "float32", "page_size": 4, "max_num_batched_tokens": 16, "max_model_len": 256, "device": "cpu"}


def options(**changes: object) -> EngineConfig:
    """Small pages and steps."""
    return EngineConfig(**(OPTIONS | changes))  # type: ignore[arg-type]


def findings(spec: ModelSpec, wanted: EngineConfig) -> dict[str, Finding]:
    """Everything that doctor finds, by check."""

    def factory(small: EngineConfig) -> EngineCore:
        return assemble(spec, small.resolve(spec, MACHINE), random_weights(spec))

    return {f.name: f for f in diagnose(spec, factory, wanted)}


def of_family(name: str, folder: Path, **changes: object) -> dict[str, Finding]:
    """What doctor finds on a random model of a family, read from a folder."""
    build(name, folder)
    wanted = options(max_model_len=120, kv_cache_memory_bytes=1 << 23, **changes)
    return {f.name: f for f in examine_model(folder / name, wanted)}


def of_kind(kind: str, **changes: object) -> dict[str, Finding]:
    """What doctor finds on a kind of model with these options."""
    return findings(tiny_spec(KINDS[kind]), options(**changes))


def wrong(found: dict[str, Finding]) -> list[Finding]:
    """Findings that say that something is wrong."""
    return [f for f in found.values() if f.status in (Status.WARN, Status.FAIL)]
