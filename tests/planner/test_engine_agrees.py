"""The planner's bytes are the engine's bytes, and what it says fits is what the engine runs at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import build, tokens

from sash.engine.build import build_core
from sash.engine.core import EngineCore
from sash.engine.frontend import Frontend
from sash.kv.storage import KVPool
from sash.planner.capacity import Layout, Precision
from sash.planner.shapes import LayerKind, Shapes
from sash.planner.solve import Question, solve
from sash.planner.sources import TypedShapes, find_shapes
from sash.spec.config import EngineConfig
from sash.spec.errors import ConfigError
from sash.spec.sampling import SamplingParams
from sash.spec.span import Span, SpanKind

ROWS = ("float32", "bfloat16", "int8")
# Family, rows, rows of windows alone.
MODELS = [
    ("llama", "float32", None),
    ("mistral", "bfloat16", None),
    ("mixtral", "int8", None),
    ("qwen2", "float32", "int8"),
    ("qwen3", "bfloat16", None),
    ("gemma2", "int8", None),
    ("gemma3", "float32", "bfloat16"),
    ("phi3", "int8", None),
    ("cohere2", "bfloat16", "int8"),
    ("olmo3", "float32", None),
    ("exaone4", "int8", "float32"),
    ("gpt-oss", "float32", "int8"),
]


def core_of(folder: Path, layout: Layout, kv_bytes: int, context: int, seats: int) -> tuple[EngineCore, Frontend]:
    precision = layout.precision
    built = build_core(
        folder,
        EngineConfig(
            dtype="float32",
            kv_cache_dtype=precision.kv,
            swa_kv_cache_dtype=precision.window_kv,
            page_size=layout.page_size,
            max_model_len=context,
            max_num_seqs=seats,
            max_num_batched_tokens=1024,
            kv_cache_memory_bytes=kv_bytes,
            debug=True,
        ),
    )
    return built.core, Frontend(built.spec, None, seed=0)


def planned(folder: Path, **question: Any) -> Any:
    return solve(find_shapes(str(folder), TypedShapes()), Question(weights="float32", **question))


@pytest.mark.parametrize(("family", "rows", "window"), MODELS, ids=[m[0] for m in MODELS])
def test_predicted_pools_are_the_engines(family: str, rows: str, window: str | None, tmp_path: Path) -> None:
    _, folder = build(family, tmp_path)
    for seats, context, kv_bytes in ((3, 90, None), (4, 128, 150_000)):
        answer = planned(folder, kv=rows, window_kv=window, context=context, requests=seats, page_size=4)
        budget = kv_bytes or answer.needed_bytes
        core, _ = core_of(folder, answer.layout, budget, context, seats)
        real = [pool.num_bytes for pool in core.runner.pools]
        pages = answer.layout.pools(context, seats, budget)
        each = answer.layout.demand(context, seats).page_bytes()
        assert real == [n * b for n, b in zip(pages, each, strict=True)]
        assert sum(real) <= budget
    assert [g.name for g in core.config.groups] == [g.name for g in answer.shapes.groups]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    "span",
    [Span.full(), Span.sliding(7), Span.sliding(6, 3), Span.chunked(8), Span(SpanKind.REFERENCE, 5)],
    ids=lambda span: span.describe(),
)
def test_predicted_bytes_of_every_kind(span: Span, rows: str) -> None:
    layout = Layout(Shapes("tiny", (LayerKind(3, span, 4, 2, 24, 16),)), Precision(kv=rows), page_size=4)
    [pages] = layout.demand(50, 1).request_pages()
    pool = KVPool(layout.shapes.groups[0], pages, 4, getattr(torch, rows), "cpu")
    assert pool.num_bytes == layout.request_bytes(50)


# Family, rows, page size, context, requests that run at once.
EDGES = [
    ("llama", "float32", 16, 64, 3),
    ("mistral", "float32", 4, 61, 5),
    ("gemma2", "bfloat16", 4, 80, 2),
    ("gemma3", "int8", 1, 47, 4),
    ("qwen3", "float32", 8, 65, 3),
    ("cohere2", "float32", 16, 33, 6),
    ("olmo3", "int8", 5, 72, 1),
    ("exaone4", "bfloat16", 2, 49, 7),
    ("gpt-oss", "float32", 4, 56, 2),
    ("phi3", "int8", 3, 100, 4),
]


def run_together(core: EngineCore, front: Frontend, context: int, count: int) -> int:
    """``count`` requests that come at the same time and answer two tokens each: how many ran at once to their end. One
    that gave way to another doesn't count."""
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    requests = [front.open(tokens(i, context - 2).tolist(), params) for i in range(count)]
    for request in requests:
        core.add(request.message)
        front.started(request)
    most = 0
    while not all(request.whole.finished for request in requests):
        for update in core.step():
            front.take(update)
        most = max(most, core.report().running)
    assert all(len(request.whole.outputs[0].token_ids) == 2 for request in requests)
    return most - core.report().preemptions


@pytest.mark.parametrize(("family", "rows", "page", "context", "seats"), EDGES, ids=[e[0] for e in EDGES])
def test_what_fits_runs_and_one_more_waits(
    family: str, rows: str, page: int, context: int, seats: int, tmp_path: Path
) -> None:
    _, folder = build(family, tmp_path)
    need = planned(folder, kv=rows, context=context, requests=seats, page_size=page, answer=2).needed_bytes
    answer = planned(folder, kv=rows, context=context, kv_bytes=need, page_size=page, answer=2)
    assert (answer.solved, answer.requests, answer.fits) == ("requests", seats, True)
    core, front = core_of(folder, answer.layout, need, context, seats)
    assert run_together(core, front, context, seats + 1) == seats
    # Not for want of a seat: with one more, the pages are short.
    core, front = core_of(folder, answer.layout, need, context, seats + 1)
    assert run_together(core, front, context, seats + 1) <= seats
    # And a byte less is too little, where the engine starts with it at all.
    try:
        core, front = core_of(folder, answer.layout, need - 1, context, seats)
    except ConfigError:
        assert need <= answer.layout.request_bytes(context)
    else:
        assert run_together(core, front, context, seats) < seats


def test_a_longest_context_is_the_longest(tmp_path: Path) -> None:
    _, folder = build("gemma3", tmp_path)
    answer = planned(folder, kv="float32", kv_bytes=60_000, requests=3, page_size=4, answer=2)
    assert (answer.solved, answer.context > 10) == ("context", True)
    core, front = core_of(folder, answer.layout, 60_000, answer.context, 3)
    assert run_together(core, front, answer.context, 3) == 3
    core, front = core_of(folder, answer.layout, 60_000, answer.context + 1, 3)
    assert run_together(core, front, answer.context + 1, 3) < 3
