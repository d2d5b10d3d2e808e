"""How pages are split between pools: within the budget, enough for one request, no more than can be used."""

from __future__ import annotations

import random

import pytest
from tests.equivalence.harness import tiny_spec

from sash.spec.groups import group_layers
from sash.spec.sizing import Demand, auto_split, check_split, ratio_split, total_tokens_split
from sash.spec.span import Span, SpanKind

MIXES = [
    [Span.sliding(20), Span.full()],
    [Span.full()],
    [Span.sliding(20), Span.sliding(90, 4)],
    [Span.sliding(20), Span.full(), Span.chunked(64), Span.sliding(20)],
    [Span(SpanKind.REFERENCE, 20), Span.full()],
]


def demand(spans: list[Span], seqs: int = 8, length: int = 512, ratio: float = 1.0) -> Demand:
    groups = group_layers(tiny_spec(spans))
    return Demand(groups, ("float32",) * len(groups), 16, length, seqs, ratio)


def used(need: Demand, pages: tuple[int, ...]) -> int:
    return sum(n * b for n, b in zip(pages, need.page_bytes(), strict=True))


@pytest.mark.parametrize("spans", MIXES, ids=lambda s: "+".join(x.kind for x in s))
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_the_automatic_split_keeps_to_the_budget_and_wastes_nothing(spans: list[Span], ratio: float) -> None:
    rng = random.Random(1)
    for _ in range(200):
        need = demand(spans, rng.randint(1, 20), rng.randint(1, 2000), ratio)
        one, budget = need.request_bytes(), rng.randint(1, 3 * 10**6)
        pages = auto_split(need, budget)
        assert used(need, pages) <= budget or budget < one, "more than the budget"
        most = tuple(need.max_num_seqs * n for n in need.request_pages())
        assert all(have <= limit for have, limit in zip(pages, most, strict=True)) or budget < most_bytes(need)
        if budget >= one:
            check_split(need, pages, "nothing")
        if budget >= most_bytes(need):
            assert pages == most


def most_bytes(need: Demand) -> int:
    return need.max_num_seqs * need.request_bytes()


def test_windows_of_all_who_can_run_come_first_up_to_half_the_budget() -> None:
    need = demand(MIXES[0], seqs=8, length=4096)
    ring, full = need.request_pages()
    ring_bytes, full_bytes = (n * b for n, b in zip(need.request_pages(), need.page_bytes(), strict=True))
    budget = 2 * full_bytes
    assert auto_split(need, budget)[0] == 8 * ring
    tight = full_bytes + 3 * ring_bytes
    assert auto_split(need, tight) == (3 * ring, full)


def test_the_ratio_is_window_tokens_over_full_tokens() -> None:
    need = demand([Span.sliding(20), Span.full(), Span.sliding(20)])
    window, full = ratio_split(need, 10**6, 0.8, None)
    assert window == int(full * 16 * 0.8) // 16
    assert used(need, (window, full)) <= 10**6 < used(need, (window + 2, full + 2))
    assert ratio_split(need, 1, 0.5, 1000) == (31, 62)


def test_total_tokens_are_the_full_pools() -> None:
    assert total_tokens_split(demand(MIXES[0]), 1000) == (24, 62)
    assert total_tokens_split(demand(MIXES[1]), 1000) == (62,)
    assert total_tokens_split(demand([Span.sliding(20)]), 1000) == (62,)
    assert total_tokens_split(demand(MIXES[0], ratio=0.0), 1000) == (62, 62)


def test_a_reference_window_is_sized_for_a_prompt_that_fills_the_context() -> None:
    assert demand(MIXES[4]).request_pages() == (32, 32)
