"""Exactly the visible positions, no more and no fewer, seen through the engine's own attention.

Queries and keys are 0, so a query weighs all that it sees alike; the value of a row is a one-hot vector of its
position (token p stands at position p, and each token's successor is the next); so an attention output's support is
the set of positions that the query saw.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.equivalence import harness
from tests.equivalence.harness import VOCAB, Request, Rig, tiny_spec

from sash.kv.storage import KVRows, Planes
from sash.ops.paged import PagedBatch
from sash.spec.config import EngineConfig
from sash.spec.model import ModelSpec
from sash.spec.span import BoundSpan, Span, SpanKind

W = 7
SPANS = [
    Span.sliding(W),
    Span.full(),
    Span.sliding(W, sinks=3),
    Span.chunked(W),
    Span(SpanKind.REFERENCE, W),
    Span(SpanKind.PREFILL_WINDOW, W),
    Span.sliding(1),
]
PROMPT, LAST = 23, VOCAB - 1
Seen = dict[tuple[int, int], tuple[BoundSpan, set[int]]]


def position_weights(spec: ModelSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights that make values one-hot positions and leave the residual stream alone."""
    out = {name: torch.zeros(shape) for name, shape in harness.expected_weights(spec).items()}
    out["embed"][:, :VOCAB] = torch.eye(VOCAB)
    out["head"][1:, : VOCAB - 1] = torch.eye(VOCAB - 1)
    for name, weight in out.items():
        if "norm" in name:
            weight.fill_(1.0)
        elif name.endswith(".v"):
            weight.copy_(torch.eye(weight.shape[0]))
    return out


def watch(rig: Rig, seen: Seen) -> None:
    """Note the support of every attention output by layer and query position."""
    runner, ops = rig.runner, rig.runner._ops
    calls = [0]

    def attention(
        q: torch.Tensor,
        rows: KVRows,
        planes: Planes,
        batch: PagedBatch,
        **how: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, lse = ops.attention(q, rows, planes, batch, **how)
        layer = calls[0] % len(rig.spec.layers)
        calls[0] += 1
        for seg in batch.segments:
            for i in range(seg.q_count):
                row = out[seg.q_row + i]
                support = set(row[0].nonzero().flatten().tolist())
                weight = row[:, sorted(support)]
                assert torch.allclose(weight, torch.full_like(weight, weight[0, 0])), "weights are not uniform"
                assert (layer, seg.q_start + i) not in seen, "a query was asked twice"
                seen[layer, seg.q_start + i] = (seg.bound, support)
        return out, lse

    runner._ops = replace(ops, attention=attention)


@pytest.mark.parametrize("kernels", ["torch", "reference", "deterministic"])
@pytest.mark.parametrize(("page", "chunk"), [(1, 5), (4, 7), (8, 1), (16, 64), (5, 16)])
def test_each_query_sees_exactly_its_span(page: int, chunk: int, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny_spec(SPANS, hidden=64, num_heads=2, num_kv_heads=1, v_head_dim=64, rope=None)
    spec = replace(spec, tied_embeddings=False)
    monkeypatch.setattr(harness, "random_weights", position_weights)
    options = EngineConfig(
        max_model_len=VOCAB,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        page_size=page,
        chunked_prefill_size=chunk,
        deterministic=kernels == "deterministic",
    )
    rig = harness.build(spec, options, kernels="torch" if kernels == "deterministic" else kernels)
    seen: Seen = {}
    watch(rig, seen)
    answers = rig.run([Request("a", tuple(range(PROMPT)), LAST - PROMPT + 1)])
    assert answers["a"].tokens == list(range(PROMPT, LAST + 1)), "every token's successor is the next"
    for layer, span in enumerate(SPANS):
        asked = sorted(q for la, q in seen if la == layer)
        assert asked == list(range(LAST)), f"layer {layer}: queries are missing"
        for q in asked:
            bound, support = seen[layer, q]
            assert support == {k for k in range(VOCAB) if bound.visible(q, k)}, f"layer {layer}, query {q}"
            if span.kind is SpanKind.SLIDING and q >= W + span.sinks:
                assert (q - span.window + 1 in support) and (q - span.window not in support)
    window, sinks = seen[0, 40][1], seen[2, 40][1]
    assert window == set(range(34, 41)) and sinks == {0, 1, 2} | window
    assert seen[3, 40][1] == set(range(35, 41)) and seen[6, 40][1] == {40}
    assert seen[4, 40][1] == set(range(PROMPT)) | window
    assert seen[5, 20][1] == set(range(14, 21)) and seen[5, 40][1] == set(range(41))
