"""Single ops: what a case counts, and a run of all of them on a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.equivalence.harness import tiny_spec
from tests.families import build

from sash.bench import ceiling, ops
from sash.ops.registry import resolve_ops
from sash.spec.errors import ConfigError
from sash.spec.span import Span


def test_attention_counts_what_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "DECODE_CONTEXTS", (3, 100))
    monkeypatch.setattr(ops, "PREFILL_CONTEXTS", (600,))
    monkeypatch.setattr(ops, "_ROUND_BYTES", 1 << 12)
    spec = tiny_spec([Span.sliding(4), Span.full()])
    cases = list(ops.attention_cases(spec, resolve_ops(kernels="reference"), torch.float32))
    found = {case.name: (case.amount, case.bound) for case in cases}
    row = 2 * 16 * 4  # two KV heads, K and V of size 8, four bytes
    pair = 2 * 4 * 16  # two operations, four query heads, K and V of size 8
    assert found == {
        "attention decode, window, context 3": (3 * row, "memory"),
        "attention decode, window, context 100": (4 * row, "memory"),
        "attention prefill 512, window, context 600": (512 * 4 * pair, "float32"),
        "attention decode, full, context 3": (3 * row, "memory"),
        "attention decode, full, context 100": (100 * row, "memory"),
        "attention prefill 512, full, context 600": (sum(range(89, 601)) * pair, "float32"),
    }
    for case in cases:
        out, lse = case.call()  # type: ignore[misc]
        assert out.isfinite().all() and lse.isfinite().all()


def test_few_rows_are_bound_by_weights_and_many_by_products() -> None:
    spec = replace(tiny_spec([Span.full()], hidden=64), vocab_size=200)
    found = {case.name: (case.amount, case.bound) for case in ops.linear_cases(spec, resolve_ops(), torch.bfloat16)}
    kind = "int8" if resolve_ops().name == "native" else "bfloat16"
    item = 1 if kind == "int8" else 2
    assert found["linear down int8, rows 1"] == (64 * 24 * item, "memory")
    assert found["linear gate_up int8, rows 512"] == (2 * 512 * 64 * 48, kind)
    assert found["linear head none, rows 8"] == (200 * 64 * 2, "memory")
    assert "linear head none, rows 512" not in found


def test_a_run_gives_rates_beside_ceilings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = build("gemma3", tmp_path)
    monkeypatch.setattr(ops, "_REPEATS", 3)
    monkeypatch.setattr(ops, "_TURNS", 2)
    monkeypatch.setattr(ops, "_ROUND_BYTES", 0)
    monkeypatch.setattr(
        ceiling, "measure_apart", lambda threads: ceiling.Ceiling(1e9, {"bfloat16": 1e12, "int8": 2e12})
    )
    said: list[str] = []
    threads = torch.get_num_threads()
    record = json.loads(
        json.dumps(ops.run(str(folder), "bfloat16", "decode, window, context 1000", threads, said.append))
    )
    [figure] = record["figures"]
    assert (figure["unit"], figure["ceiling_per_s"], figure["runs"]) == ("GB/s", 1e9, 3)
    assert figure["per_s"] > 0 and figure["best_s"] <= figure["seconds"]
    assert said[0].startswith("attention decode, window, context 1000") and said[0].endswith("% of 1")
    with pytest.raises(ConfigError, match=r"--only 'softmax' is in no case's name"):
        ops.run(str(folder), "bfloat16", "softmax", threads)
    with pytest.raises(ConfigError, match=r"--dtype 'int3' has no ceiling to compare with"):
        ops.run(str(folder), "int3", "", threads)


def test_growth_is_the_far_time_to_the_near_one_of_bounded_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_TURNS", 2)
    monkeypatch.setattr(ops, "_ROUND_BYTES", 0)
    # A clock that shows the context.
    monkeypatch.setattr(ceiling, "best_time", lambda call, repeats: call())
    monkeypatch.setattr(
        ops, "_attention", lambda layer, group, kernels, dtype, context, rows: SimpleNamespace(call=lambda: context)
    )
    spec = tiny_spec([Span.sliding(4), Span.full(), Span.chunked(8)])
    assert ops.window_growth(spec, resolve_ops(kernels="reference"), torch.float32) == {"window": 30.0, "chunk": 30.0}
