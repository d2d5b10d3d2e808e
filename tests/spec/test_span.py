"""The one rule of visibility, against a second wording of it, kind by kind."""

from __future__ import annotations

import pytest

from sash.spec.errors import ConfigError
from sash.spec.span import Span, SpanKind

R, END = 9, 40  # prompt and length of the request


def seen_in_words(span: Span, q: int) -> set[int]:
    """What the query at ``q`` sees, from the definitions of the kinds."""
    causal, w = range(q + 1), span.window
    match span.kind:
        case SpanKind.FULL:
            return set(causal)
        case SpanKind.SLIDING:
            return {k for k in causal if q - k < w or k < span.sinks}
        case SpanKind.CHUNKED:
            return {k for k in causal if k // w == q // w}
        case SpanKind.REFERENCE:
            return {k for k in causal if q - k < w or k < R}
        case SpanKind.PREFILL_WINDOW:
            return {k for k in causal if q - k < w or q >= R}


SPANS = [Span.full()] + [
    make(w)
    for w in (1, 2, 5, 64)
    for make in (
        Span.sliding,
        lambda w: Span.sliding(w, sinks=3),
        Span.chunked,
        lambda w: Span(SpanKind.REFERENCE, w),
        lambda w: Span(SpanKind.PREFILL_WINDOW, w),
    )
]


@pytest.mark.parametrize("span", SPANS, ids=str)
def test_bounds_and_retention_follow_from_visibility(span: Span) -> None:
    bound = span.bind(R)
    for q in range(END):
        wanted = seen_in_words(span, q)
        assert {k for k in range(END) if bound.visible(q, k)} == wanted
        assert {k for k in range(END) if k <= bound.last(q) and (k < bound.sinks or k >= bound.first(q))} == wanted
        assert bound.num_visible(q) == len(wanted)
    for computed in range(END):
        later = set().union(*(seen_in_words(span, q) for q in range(computed, END))) & set(range(computed))
        kept = {k for k in range(computed) if k < bound.sinks or k >= bound.retained_from(computed)}
        assert later <= kept, "a row that a later query sees would be dropped"
        if span.kind is not SpanKind.PREFILL_WINDOW and computed + span.window < END:
            assert kept - set(range(bound.sinks)) == later - set(range(bound.sinks)), "a dead row would be kept"
    for start in range(END):
        for end in range(start + 1, END):
            assert bound.first_of(start, end) == min(bound.first(q) for q in range(start, end))


@pytest.mark.parametrize("span", SPANS, ids=str)
@pytest.mark.parametrize("prompt", [1, 7, 30])
def test_pairs_are_the_sum_of_visible_keys(span: Span, prompt: int) -> None:
    bound = span.bind(prompt)
    counts = [bound.num_visible(q) for q in range(41)]
    assert [bound.num_pairs(n) for n in range(42)] == [sum(counts[:n]) for n in range(42)]


def test_a_window_counts_the_query_itself() -> None:
    bound = Span.sliding(4).bind(0)
    assert bound.visible(10, 7) and not bound.visible(10, 6) and not bound.visible(10, 11)
    assert not Span.sliding(1).bind(0).visible(3, 2) and Span.sliding(1).bind(0).visible(3, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Span.sliding(0), "window must be at least 1"),
        (lambda: Span.chunked(-1), "window must be at least 1"),
        (lambda: Span(SpanKind.FULL, 3), "a full span has no window"),
        (lambda: Span(SpanKind.FULL, 0, 3), "a full span has no window and no sinks"),
        (lambda: Span.sliding(4, sinks=-1), "sinks must be 0 or more"),
        (lambda: Span(SpanKind.CHUNKED, 4, 2), "sinks .* need a sliding span"),
        (lambda: Span(SpanKind.REFERENCE, 4, 2), "sinks .* need a sliding span"),
    ],
)
def test_spans_that_mean_nothing_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


def test_what_is_bounded_and_how_it_is_called() -> None:
    assert [Span.full().bounded, Span(SpanKind.PREFILL_WINDOW, 4).bounded] == [False, False]
    assert all(s.bounded for s in (Span.sliding(4), Span.chunked(4), Span(SpanKind.REFERENCE, 4)))
    words = [s.describe() for s in (SPANS[0], *(s for s in SPANS if s.window == 5))]
    assert words == [
        "full",
        "window 5",
        "window 5 + 3 sinks",
        "chunk 5",
        "prompt + window 5",
        "window 5 in prefill",
    ]
