"""Doctor's own rule is the one of ``sash.spec.span``, found a second time."""

from __future__ import annotations

import pytest
from tests.doctor.kinds import KINDS

from sash.doctor.reference import mask
from sash.doctor.rule import most_pages, needed, sees
from sash.spec.footprint import table_shape
from sash.spec.span import Span

SPANS = sorted({span for spans in KINDS.values() for span in spans}, key=str)


@pytest.mark.parametrize("span", SPANS, ids=Span.describe)
@pytest.mark.parametrize("prompt", [1, 6, 20])
def test_agrees(span: Span, prompt: int) -> None:
    bound = span.bind(prompt)
    seen = mask(span, prompt, 30)
    for q in range(30):
        for k in range(30):
            assert bool(sees(span, prompt, q, k)) == bound.visible(q, k) == bool(seen[q, k])
        kept = [k for k in range(q) if needed(span, prompt, q, k)]
        assert kept == [k for k in range(q) if any(bound.visible(later, k) for later in range(q, 60))]


@pytest.mark.parametrize("span", [s for s in SPANS if s.bounded], ids=Span.describe)
@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("slack", [0, 3])
def test_most_pages_are_the_table_s_or_a_page_more(span: Span, page: int, slack: int) -> None:
    shape = table_shape(span.bind(9), page, 4096, slack=slack)
    most = most_pages(span, 9, page, slack)
    assert most is not None and shape.pages(4096) <= most <= shape.pages(4096) + 1
