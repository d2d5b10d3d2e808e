"""Deterministic ops: a row's bits don't depend on what is computed beside it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from tests.ops.attention_cases import Part, make_call
from tests.ops.test_attention import random_span

from sash.ops import fixed
from sash.spec.span import Span

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _inference() -> object:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64, 96), (33, 7), (640, 301)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_rows_are_the_same_alone_and_together(shape: tuple[int, int], bias: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(71, shape[0], generator=generator).to(dtype)
    weight = torch.randn(shape[1], shape[0], generator=generator).to(dtype)
    own = torch.randn(shape[1], generator=generator).to(dtype) if bias else None
    whole = fixed.linear(x, weight, own)
    wanted = torch.nn.functional.linear(x.double(), weight.double(), None if own is None else own.double())
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(whole.double(), wanted, rtol=tolerance, atol=tolerance * 10)
    for first, count in ((0, 1), (70, 1), (5, 31), (5, 32), (5, 33), (0, 64)):
        assert torch.equal(fixed.linear(x[first : first + count], weight, own), whole[first : first + count])


def test_linear_of_no_rows() -> None:
    assert fixed.linear(torch.zeros(0, 5), torch.zeros(3, 5), None).shape == (0, 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_attention_rows_are_the_same_alone_and_together(seed: int, dtype: torch.dtype) -> None:
    random = Random(seed)
    how = {"heads": 2, "folded": random.randint(1, 5), "dim": random.choice([4, 8, 20]), "dtype": dtype}
    parts = []
    for _ in range(5):
        start, count = random.randint(0, 150), random.choice([1, 3, 32, 45])
        parts.append(Part(random_span(random), start, start, start + count))
    together, together_lse = make_call(parts, **how).run(fixed.attention)
    order = list(range(5))
    random.shuffle(order)
    shuffled, _ = make_call([parts[i] for i in order], names=order, **how).run(fixed.attention)
    at = [sum(p.end - p.q_start for p in parts[:i]) for i in range(6)]
    row = 0
    for i in order:
        alone, lse = make_call([parts[i]], names=[i], **how).run(fixed.attention)
        assert torch.equal(alone, together[at[i] : at[i + 1]])
        assert torch.equal(lse, together_lse[at[i] : at[i + 1]])
        assert torch.equal(alone, shuffled[row : row + len(alone)])
        row += len(alone)


@pytest.mark.parametrize("span", [Span.full(), Span.sliding(50, sinks=3), Span.chunked(40)], ids=Span.describe)
def test_attention_rows_are_the_same_in_any_chunk(span: Span) -> None:
    """Batch mates decide how long a chunk is, so the split of a prompt must not show either."""
    bound = span.bind(1)
    whole, _ = make_call([Part(bound, 0, 0, 200)]).run(fixed.attention)
    for start, end in ((0, 7), (7, 107), (107, 108), (108, 200), (150, 183)):
        for hand in (True, False) if end - start == 1 else (True,):
            part = Part(bound, start, start, end, hand=hand, extra=start % 5)
            chunk, _ = make_call([part], page=16).run(fixed.attention)
            assert torch.equal(chunk, whole[start:end])
            narrowed, _ = make_call([replace(part, q_start=end - 1)]).run(fixed.attention)
            assert torch.equal(narrowed, whole[end - 1 : end])
