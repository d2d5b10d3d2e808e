"""The bytes formula and the shape of tables; the formula's answer is what the pools really take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.equivalence.harness import MACHINE, random_weights, tiny_spec

from sash.engine.build import assemble
from sash.kv.storage import KVPool
from sash.spec.config import DTYPE_BYTES, EngineConfig
from sash.spec.footprint import page_bytes, row_bytes, table_shape, uniform_bytes
from sash.spec.groups import group_layers
from sash.spec.span import Span, SpanKind

SPANS = [
    Span.full(),
    Span.sliding(7),
    Span.sliding(6, sinks=5),
    Span.chunked(8),
    Span(SpanKind.REFERENCE, 5),
    Span(SpanKind.PREFILL_WINDOW, 5),
]
STORED = [
    ("float32", "int8", None),
    ("bfloat16", "int8", "auto"),
    ("float32", "auto", "int8"),
    ("float32", "bfloat16", "float32"),
    ("float16", "int8", "bfloat16"),
]


@pytest.mark.parametrize(("dtype", "kv", "window"), [*((d, "auto", None) for d in DTYPE_BYTES), *STORED])
@pytest.mark.parametrize("v_head_dim", [8, 12])
@pytest.mark.parametrize("page", [1, 16, 24])
def test_predicted_bytes_are_the_pools_real_bytes(
    dtype: str, kv: str, window: str | None, v_head_dim: int, page: int
) -> None:
    spec = tiny_spec([*SPANS, SPANS[1]], v_head_dim=v_head_dim)
    options = EngineConfig(
        dtype=dtype,
        kv_cache_dtype=kv,
        swa_kv_cache_dtype=window,
        device="cpu",
        page_size=page,
        max_model_len=100,
        max_num_seqs=3,
    )
    config = options.resolve(spec, MACHINE)
    assert len(config.groups) == len(SPANS)
    real = []
    for group, pages, stored in zip(config.groups, config.pages, config.demand.dtypes, strict=True):
        wanted = (window or kv) if group.bounded else kv
        assert stored == (dtype if wanted == "auto" else wanted)
        pool = KVPool(group, pages, page, getattr(torch, stored), "cpu")
        real.append(sum(plane.untyped_storage().nbytes() for plane in pool.planes))
        assert pool.num_bytes == real[-1] == pages * page_bytes(group, page, stored)
    assert config.pool_bytes() == tuple(real)
    weights = {name: w.to(getattr(torch, dtype)) for name, w in random_weights(spec).items()}
    pools = assemble(spec, config, weights).runner.pools  # type: ignore[attr-defined]
    assert tuple(pool.num_bytes for pool in pools) == config.pool_bytes()


def test_bytes_of_rows_and_of_one_uniform_cache() -> None:
    window, full = group_layers(tiny_spec([Span.sliding(7), Span.full(), Span.sliding(7)], v_head_dim=12))
    assert row_bytes(window, "float32") == 2 * 2 * (8 + 12) * 4 and row_bytes(full, "bfloat16") == 2 * (8 + 12) * 2
    # A scale in float32 for K and one for V, in each head.
    assert row_bytes(window, "int8") == 2 * 2 * (8 + 12 + 4 + 4)
    both = row_bytes(window, "int8") + row_bytes(full, "float32")
    assert uniform_bytes((window, full), 33, 16, ("int8", "float32")) == 3 * 16 * both


@pytest.mark.parametrize(
    ("span", "page", "pin", "ring"),
    [
        (Span.full(), 16, 0, 7),
        (Span(SpanKind.PREFILL_WINDOW, 5), 16, 0, 7),
        (Span.sliding(1), 16, 0, 1),
        (Span.sliding(16), 16, 0, 2),
        (Span.sliding(17), 16, 0, 2),
        (Span.sliding(18), 16, 0, 3),
        (Span.sliding(1000), 16, 0, 7),
        (Span.sliding(17, sinks=1), 16, 1, 2),
        (Span.sliding(17, sinks=17), 16, 2, 2),
        (Span.chunked(32), 16, 0, 2),
        (Span.chunked(33), 16, 0, 3),
        (Span(SpanKind.REFERENCE, 17), 16, 2, 2),
        (Span.sliding(5), 1, 0, 5),
    ],
)
def test_the_shape_of_tables(span: Span, page: int, pin: int, ring: int) -> None:
    shape = table_shape(span.bind(20), page, 100)
    assert (shape.pin, shape.ring) == (pin, ring)
    assert shape.pages(10_000) == pin + ring and shape.pages(1) == 1 and shape.pages(page + 1) == min(2, pin + ring)


@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize("span", SPANS, ids=str)
def test_a_table_has_a_place_for_every_row_that_is_kept(span: Span, page: int) -> None:
    """Columns of kept rows never collide: not in the smallest ring, and not with rows kept below the window."""
    for ratio, slack in ((1.0, 0), (1.0, 9), (0.5, 0), (0.0, 0)):
        bound = span.bind(10)
        shape = table_shape(bound, page, 90, slack=slack, hybrid_ratio=ratio)
        for end in range(1, 90):
            first = bound.retained_from(max(0, end - shape.slack))
            kept = {k // page for k in range(end) if k >= first or k < shape.pin * page}
            assert len({shape.column(p) for p in kept}) == len(kept), f"row {end}: two pages share a column"
            assert all(shape.column(p) < shape.pin + shape.ring for p in kept)


def test_ratio_between_full_length_and_ring() -> None:
    bound = Span.sliding(17).bind(0)
    rings = [table_shape(bound, 16, 320, hybrid_ratio=r).ring for r in (0.0, 0.5, 1.0)]
    assert rings == [20, 11, 2]
    slacks = [table_shape(bound, 16, 320, hybrid_ratio=r).slack for r in (0.0, 0.5, 1.0)]
    assert slacks == [18 * 16, 9 * 16, 0]


def test_groups_are_layers_that_can_share_a_table() -> None:
    spec = tiny_spec([Span.sliding(7), Span.full(), Span.sliding(7), Span.sliding(8), Span.full()])
    other = replace(spec.layers[4], num_kv_heads=1)
    groups = group_layers(replace(spec, layers=(*spec.layers[:4], other)))
    assert [(g.name, g.layers) for g in groups] == [
        ("window", (0, 2)),
        ("full", (1,)),
        ("window-2", (3,)),
        ("full-2", (4,)),
    ]
