from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sash.lab.context import Context
from sash.lab.edge import EXPERIMENT, Plan, _attended, _decode_weights, _prefill_weights, by_distance, measure
from sash.lab.experiment import NotApplicable, Verdict
from sash.ops.base import Ops
from sash.ops.paged import PagedBatch
from sash.spec.span import Span, SpanKind

PLAN = Plan(queries=4, windows=3)


def test_the_window_s_edge_is_exact(context: Context) -> None:
    found = measure(context, PLAN)
    assert found.verdict is Verdict.HOLDS and "the window ends where it should" in found.sentence
    by_kernel = {row["kernel"]: row for row in found.rows}
    assert by_kernel.keys() == {f"{k} layer, {how}" for k in ("window", "full") for how in ("reading", "writing")}
    for how in ("reading", "writing"):
        assert by_kernel[f"window layer, {how}"]["at W"] == 0 < by_kernel[f"window layer, {how}"]["at W - 1"]
        assert by_kernel[f"full layer, {how}"]["at W"] > 0
        assert by_kernel[f"window layer, {how}"]["share within W"] == 1
    # Both kernels mix alike.
    lines = found.plots[0].lines
    for kind in ("window", "full"):
        pairs = zip(lines[f"{kind} layer, reading"], lines[f"{kind} layer, writing"], strict=True)
        assert all(a == pytest.approx(b, abs=1e-5) for a, b in pairs)


@pytest.mark.parametrize("by", [-1, 1])
def test_a_kernel_that_is_off_by_one_is_found(context: Context, monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    ops = context.weights.ops

    def wrong(q: torch.Tensor, rows: Any, planes: Any, batch: PagedBatch, **how: Any) -> Any:
        def other(span: Span) -> Span:
            return Span.sliding(span.window + by) if span.kind is SpanKind.SLIDING else span

        segments = tuple(replace(s, bound=other(s.bound.span).bind(s.bound.prompt_tokens)) for s in batch.segments)
        return ops.attention(q, rows, planes, PagedBatch(segments), **how)

    patched: Ops = replace(ops, attention=wrong)
    monkeypatch.setattr(context.weights.decoder, "ops", patched)
    found = measure(context, PLAN)
    assert found.verdict is Verdict.FAILS and "the window does NOT end where it should" in found.sentence
    assert f"end at distance {4 + by}" in found.plots[0].reading


def test_weights_are_those_of_capped_logits(context: Context) -> None:
    """With a cap near 0 all logits are alike, and so are all weights within the window."""
    layer = replace(context.spec.layers[0], softcap=1e-6)
    rows = _attended(context.weights, context.ids(20))[5]
    for weights in (_prefill_weights, _decode_weights):
        found = weights(context.weights, layer, rows, 16)
        assert found[found > 0].tolist() == pytest.approx([1 / 5] * int((found > 0).sum()), abs=1e-4)


def test_a_model_without_windows_has_no_edge(full_context: Context) -> None:
    with pytest.raises(NotApplicable, match="no layer of this model has a window"):
        EXPERIMENT.run(full_context)


def test_distances_count_back_from_the_query() -> None:
    # Queries at 2 and 3; each gives 0.7 to itself, 0.2 to the one before.
    found = torch.tensor([[[0.1, 0.2, 0.7, 0.0]], [[0.0, 0.1, 0.2, 0.7]]])
    assert by_distance(found, 2) == pytest.approx([0.7, 0.2, 0.1])
