"""Faults planted into ledger, kernels, table of ops and scheduler: doctor names each, by what it sees alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.doctor.kinds import findings, of_kind, options, wrong
from tests.equivalence.harness import tiny_spec

from sash.doctor.finding import Finding, Status
from sash.engine import step as engine_step
from sash.engine.runner import Runner
from sash.engine.step import Step
from sash.kv.ledger.table import PageTable
from sash.kv.storage import KVPool
from sash.models.rope import Rope
from sash.ops import attention_torch, native
from sash.ops.paged import PagedBatch, Segment
from sash.scheduler.scheduler import Scheduler
from sash.spec import sizing
from sash.spec.footprint import TableShape
from sash.spec.span import BoundSpan, Span, SpanKind

KERNELS = pytest.mark.parametrize("kernels", ["native", "torch"])


def only(found: dict[str, Finding], name: str) -> Finding:
    """The one finding; all else is well, or explained by it. Slow kernels were asked for."""
    bad = [f for f in wrong(found) if f.name != "kernels"]
    assert [f.name for f in bad] == [name], "\n".join(f"{f.name}: {f.evidence}" for f in bad)
    assert bad[0].evidence and bad[0].cause and bad[0].fix
    return bad[0]


def wrap(patch: pytest.MonkeyPatch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function by ``around(the old one, *arguments)``."""
    inner = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return around(inner, *args, **kwargs)

    patch.setattr(owner, name, call)


@pytest.fixture(autouse=True)
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = request.node.callspec.params.get("kernels") if hasattr(request.node, "callspec") else None
    if kernels:
        if kernels == "native" and native.load()[0] is None:
            pytest.skip("the C++ kernels are not built")
        monkeypatch.setenv("SASH_KERNELS", kernels)


# ---------------------------------------------------------------------------------------- the cache grows


@KERNELS
def test_cache_grows_in_the_ledger(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never_wraps(inner: Any, bound: BoundSpan, page_size: int, length: int, **more: Any) -> TableShape:
        return replace(inner(bound, page_size, length, **more), ring=max(length // page_size, 1))

    wrap(monkeypatch, sizing, "table_shape", never_wraps)
    fault = only(of_kind("hybrid"), "cache-bounded")
    assert "window layers" in fault.evidence and "grows in a line" in fault.cause


def test_pages_that_never_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageTable, "release", lambda table: table._pool.unpromise(table.promise))
    assert "don't come back" in only(of_kind("pure"), "cache-bounded").cause


def test_a_pool_that_is_made_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    def larger(inner: Any, runner: Runner, *args: Any) -> Any:
        result = inner(runner, *args)
        for pool in runner.pools:
            pool.planes = (*pool.planes, torch.zeros_like(pool.k))
        return result

    wrap(monkeypatch, Runner, "run", larger)
    assert "made larger" in only(of_kind("pure"), "cache-bounded").cause


# ---------------------------------------------------------------------------------------- mask by slot


def by_slot(seg: Segment) -> Segment:
    return replace(seg, past_positions=seg.past_slots)


@KERNELS
def test_mask_by_slot(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels == "native":
        wrap(monkeypatch, native, "flatten", lambda inner, b: _slots_for_positions(inner(b)))
    else:

        def attention(inner: Any, q: Any, rows: Any, planes: Any, batch: PagedBatch, **more: Any) -> Any:
            return inner(q, rows, planes, PagedBatch(tuple(map(by_slot, batch.segments))), **more)

        wrap(monkeypatch, attention_torch, "attention", attention)
    fault = only(of_kind("pure"), "mask-by-position")
    assert "slots instead of positions" in fault.cause and "must see and doesn't" in fault.evidence


def _slots_for_positions(flat: native.Flat) -> native.Flat:
    return replace(flat, positions=flat.slots)


def test_no_mask_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    wrap(monkeypatch, Segment, "bounds", lambda inner, *args: _all_seen(inner(*args)))
    monkeypatch.setattr(engine_step, "_segment", _everything_stored(engine_step._segment))
    assert only(of_kind("hybrid"), "mask-by-position").evidence.count("sees and mustn't") == 1


def _all_seen(bounds: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros_like(bounds[0]), bounds[1]


def _everything_stored(inner: Any) -> Any:
    """Attention to every row that the ring still holds."""

    def segment(table: Any, item: Any, rows: Any, q_row: int, kv_row: int, single: bool) -> Any:
        made = inner(table, item, rows, q_row, kv_row, single)
        shape = table.shape
        first = max(0, (item.start // shape.page_size - shape.ring + 1) * shape.page_size)
        if item.count > 1 or not single:
            return made
        past = torch.arange(first, made.kv_start)
        slots = torch.from_numpy(engine_step._slots(table, table.write, past.numpy()))
        return replace(made, past_positions=past, past_slots=slots)

    return segment


# ---------------------------------------------------------------------------------------- off by one


@KERNELS
@pytest.mark.parametrize("step", [1, -1])
def test_window_off_by_one(kernels: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def first(inner: Any, bound: BoundSpan, q: int) -> int:
        right: int = inner(bound, q)
        return max(0, q - bound.span.window + 1 - step) if bound.span.kind is SpanKind.SLIDING else right

    wrap(monkeypatch, BoundSpan, "first", first)
    fault = only(of_kind("hybrid"), "mask-edge")
    assert "off by one" in fault.cause and f"{7 + step} rows are seen instead of 7" in fault.cause
    assert f"distance {7 if step > 0 else 6}" in fault.evidence


def test_a_kernel_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    wrap(monkeypatch, Segment, "bounds", lambda inner, *args: (inner(*args)[0] + 1, inner(*args)[1]))
    assert "off by one" in only(of_kind("pure"), "mask-edge").cause


# ---------------------------------------------------------------------------------------- positions


@KERNELS
@pytest.mark.parametrize("kind", ["pure", "hybrid", "sinks", "full first"])
def test_positions_reset_at_wrap(kernels: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(inner: Any, step: Step, *args: Any) -> None:
        inner(step, *args)
        step.positions = step.positions % 12

    wrap(monkeypatch, Step, "__init__", reset)
    fault = only(of_kind(kind), "positions-absolute")
    assert "start again" in fault.cause and "is stored with the angle of position" in fault.evidence


def test_angles_reset_at_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SASH_KERNELS", "torch")
    wrap(monkeypatch, Rope, "cos_sin", lambda inner, rope, positions: inner(rope, positions % 12))
    assert "start again" in only(of_kind("pure"), "positions-absolute").cause


# ---------------------------------------------------------------------------------------- batch


@KERNELS
def test_shared_write_pointer(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_of_all(inner: Any, parts: list[Any], device: Any) -> Any:
        singles = [rows for rows, _ in parts if len(rows) == 1]
        if len(singles) > 1 and len(singles) == len(parts):
            parts = [(rows, parts[0][1]) for rows, _ in parts]
        return inner(parts, device)

    wrap(monkeypatch, engine_step, "_joined", first_of_all)
    fault = only(of_kind("hybrid"), "batch-isolated")
    assert "share a write pointer" in fault.cause


# ---------------------------------------------------------------------------------------- copies


@KERNELS
def test_copy_of_the_pool_in_each_step(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def copying(inner: Any, runner: Runner, *args: Any) -> Any:
        for pool in runner.pools:
            pool.k.clone()
        return inner(runner, *args)

    wrap(monkeypatch, Runner, "run", copying)
    fault = only(of_kind("hybrid"), "no-copies")
    assert "copies cached rows" in fault.cause and "KiB out of the window and full pools" in fault.evidence


def test_copy_in_the_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SASH_KERNELS", "torch")

    def attention(inner: Any, q: Any, rows: Any, planes: Any, batch: Any, **more: Any) -> Any:
        return inner(q, rows, replace(planes, k=planes.k.clone(), v=planes.v.clone()), batch, **more)

    wrap(monkeypatch, attention_torch, "attention", attention)
    assert "copies cached rows" in only(of_kind("pure"), "no-copies").cause


@KERNELS
def test_rows_that_shift_in_each_step(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifting(inner: Any, runner: Runner, *args: Any) -> Any:
        result = inner(runner, *args)
        for pool in runner.pools:
            for plane in pool.planes:
                plane.copy_(plane.roll(-1, 2))
        return result

    wrap(monkeypatch, Runner, "run", shifting)
    assert "moved as the window slides" in only(of_kind("pure"), "no-copies").cause


def test_a_pool_that_is_allocated_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def anew(inner: Any, runner: Runner, *args: Any) -> Any:
        result = inner(runner, *args)
        for pool in runner.pools:
            pool.k = pool.k.clone()
        return result

    wrap(monkeypatch, Runner, "run", anew)
    assert "allocates the pool anew" in only(of_kind("pure"), "no-copies").cause


# ---------------------------------------------------------------------------------------- pools and chunks


def test_wrong_ratio_asked_for() -> None:
    changes = {"max_model_len": 1024, "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 20}
    assert wrong(of_kind("hybrid", **changes)) == []
    fault = only(of_kind("hybrid", swa_full_tokens_ratio=0.9, **changes), "pool-split")
    assert "full pool is short" in fault.cause and "--swa-full-tokens-ratio" in fault.fix


def test_wrong_split_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def halves(_inner: Any, demand: sizing.Demand, budget: int) -> tuple[int, ...]:
        return tuple(budget // 2 // size for size in demand.page_bytes())

    wrap(monkeypatch, sizing, "auto_split", halves)
    found = of_kind("hybrid", max_model_len=4096, max_num_seqs=8, kv_cache_memory_bytes=3 << 20)
    assert "full pool is short" in wrong_named(found, "pool-split").cause


def wrong_named(found: dict[str, Finding], name: str) -> Finding:
    assert found[name].status is Status.FAIL, found[name]
    return found[name]


def test_chunk_smaller_than_the_window_asked_for() -> None:
    fault = only(of_kind("hybrid", chunked_prefill_size=2), "chunk-and-window")
    assert "chunks of 2 rows, windows of 7" in fault.evidence and "--chunked-prefill-size" in fault.fix


def test_chunk_smaller_than_the_window_scheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(inner: Any, scheduler: Scheduler, ledger: Any, **more: Any) -> None:
        inner(scheduler, ledger, **(more | {"chunk": 3}))

    wrap(monkeypatch, Scheduler, "__init__", small)
    assert "chunks of 3 rows" in only(of_kind("pure"), "chunk-and-window").evidence


def test_rows_lost_at_the_edge_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(inner: Any, table: Any, item: Any, rows: Any, q_row: int, kv_row: int, single: bool) -> Any:
        made = inner(table, item, rows, q_row, kv_row, single)
        if item.count == 1:
            return made
        return replace(made, past_positions=made.past_positions[:0], past_slots=made.past_slots[:0])

    wrap(monkeypatch, engine_step, "_segment", forgets)
    assert "lost at the edge" in only(of_kind("hybrid"), "chunk-edge").cause


def test_full_storage_behind_a_window_mask() -> None:
    fault = only(of_kind("hybrid", disable_hybrid_swa_memory=True), "window-used")
    assert "saves no memory" in fault.cause and "--disable-hybrid-swa-memory" in fault.fix


def test_an_option_without_effect() -> None:
    spec = tiny_spec([Span.sliding(7)] * 2)
    fault = only(findings(spec, options(swa_full_tokens_ratio=0.5)), "rejected")
    assert "swa_full_tokens_ratio is ignored" in fault.evidence


def test_rows_written_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SASH_KERNELS", "torch")

    def half(inner: Any, pool: KVPool, layer: int, rows: Any, which: Any, slots: Any) -> None:
        inner(pool, layer, replace(rows, k=rows.k * 0.5), which, slots)

    wrap(monkeypatch, KVPool, "write", half)
    assert "damaged" in only(of_kind("pure"), "positions-absolute").cause


# ---------------------------------------------------------------------------------------- under rounding

ROUNDED = {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"}


def test_faults_are_told_in_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong(of_kind("hybrid", **ROUNDED)) == []

    def reset(inner: Any, step: Step, *args: Any) -> None:
        inner(step, *args)
        step.positions = step.positions % 12

    with monkeypatch.context() as patch:
        wrap(patch, Step, "__init__", reset)
        only(of_kind("hybrid", **ROUNDED), "positions-absolute")
    with monkeypatch.context() as patch:
        wrap(patch, Segment, "bounds", lambda inner, *args: (inner(*args)[0] - 1, inner(*args)[1]))
        patch.setattr(engine_step, "_segment", _everything_stored(engine_step._segment))
        assert "8 rows are seen instead of 7" in only(of_kind("hybrid", **ROUNDED), "mask-edge").cause
