"""Any three of memory, precision, context and requests give the fourth, and the four agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sash.planner.capacity import WEIGHT_BYTES, Layout, Precision, largest, weight_bytes
from sash.planner.presets import find_preset
from sash.planner.shapes import LayerKind, Shapes, WeightCount
from sash.planner.solve import Question, instead, solve
from sash.spec.errors import ConfigError
from sash.spec.footprint import KV_BYTES
from sash.spec.span import Span, SpanKind

G = 2**30


def shapes(name: str = "gemma-3-27b") -> Shapes:
    found = find_preset(name)
    assert found is not None
    return found


def test_the_four_questions_agree() -> None:
    known = Question(weights="int8", kv="bfloat16", context=30_000, requests=5)
    needed = solve(shapes(), known)
    assert (needed.solved, needed.fits) == ("memory", True)
    given_memory = replace(known, memory_bytes=needed.memory_bytes)
    assert solve(shapes(), given_memory).fits
    assert solve(shapes(), replace(given_memory, requests=None)).requests == 5
    # A page isn't always full at its end: the longest context may be some tokens more.
    assert 30_000 <= solve(shapes(), replace(given_memory, context=None)).context < 30_000 + 2 * 16
    open_precision = replace(given_memory, weights=None, kv=None)
    assert solve(shapes(), open_precision).layout.precision == Precision("int8", "bfloat16")


def test_a_little_less_memory_is_too_little() -> None:
    known = Question(weights="int8", kv="bfloat16", context=30_000, requests=5, reserve=0)
    memory = solve(shapes(), known).memory_bytes
    assert memory is not None
    checked = [solve(shapes(), replace(known, memory_bytes=memory - less)) for less in (0, 1)]
    assert [(a.solved, a.fits) for a in checked] == [("check", True), ("check", False)]


def test_precision_is_the_widest_that_fits() -> None:
    found = []
    for gib in (80, 60, 40, 32, 22):
        answer = solve(shapes(), Question(memory_bytes=gib * G, context=8192, requests=4))
        found.append((answer.layout.precision.weights, answer.layout.precision.kv, answer.fits))
    assert found == [
        ("bfloat16", "bfloat16", True),
        ("bfloat16", "int8", True),
        ("int8", "bfloat16", True),
        ("int8", "int8", True),
        ("int4", "int8", True),
    ]
    nothing = solve(shapes(), Question(memory_bytes=4 * G, context=8192, requests=4))
    assert (nothing.fits, nothing.layout.precision) == (False, Precision("int4", "int8"))


@pytest.mark.parametrize(
    "question",
    [
        Question(memory_bytes=8 * G, context=8192, requests=4),
        Question(memory_bytes=40 * G, weights="bfloat16", kv="bfloat16", context=131_072, requests=3),
        Question(memory_bytes=60 * G, weights="bfloat16", context=65_536, requests=30),
        Question(memory_bytes=8 * G),
        Question(memory_bytes=30 * G, reserve=4 * G, requests=2),
        Question(kv_bytes=G // 2, context=32_768, requests=6),
        Question(kv_bytes=G // 2, kv="bfloat16", weights="int4", context=32_768, requests=6),
        Question(kv_bytes=1, requests=2),
        Question(memory_bytes=8 * G, window_kv="int8"),
        Question(memory_bytes=40 * G, weights="int4", kv="bfloat16", context=65_536, requests=40),
    ],
)
def test_what_is_offered_instead_fits(question: Question) -> None:
    answer = solve(shapes(), question)
    offers = instead(answer, question)
    assert not answer.fits
    assert any(offer.solved == "memory" for offer in offers), "enough memory always does"
    for offer in offers:
        precision = offer.layout.precision
        taken = replace(
            question,
            weights=precision.weights,
            kv=precision.kv,
            context=offer.context,
            requests=offer.requests,
            memory_bytes=offer.memory_bytes if question.memory_bytes is not None else None,
            kv_bytes=offer.needed_bytes if question.kv_bytes is not None else None,
        )
        assert solve(shapes(), taken).fits, offer.solved
        if offer.solved != "memory":
            limit = (taken.memory_bytes, taken.kv_bytes and taken.kv_bytes <= (question.kv_bytes or 0))
            assert limit in ((question.memory_bytes, None), (None, True)), "within what is there"
        was = answer.layout.precision
        assert WEIGHT_BYTES[precision.weights] <= WEIGHT_BYTES[was.weights], "never wider than asked"
        assert KV_BYTES[precision.kv] <= KV_BYTES[was.kv] and precision.window_kv == was.window_kv
        assert question.kv_bytes is None or precision.weights == was.weights, "pools don't depend on weights"
    assert len({(o.solved, o.layout.precision) for o in offers}) == len(offers)
    assert instead(solve(shapes(), Question(memory_bytes=100 * G)), Question(memory_bytes=100 * G)) == ()


def test_a_precision_is_offered_before_narrower_ones() -> None:
    question = Question(memory_bytes=40 * G, weights="bfloat16", kv="bfloat16", context=8192, requests=4)
    offers = instead(solve(shapes(), question), question)
    assert [(o.solved, o.layout.precision.weights) for o in offers] == [("precision", "int8"), ("memory", "bfloat16")]


def test_defaults() -> None:
    answer = solve(shapes(), Question())
    assert (answer.solved, answer.context, answer.requests) == ("memory", 32_768, 1)
    answer = solve(shapes("mistral-7b"), Question(memory_bytes=24 * G))
    assert (answer.solved, answer.context) == ("requests", 32_768)
    assert answer.requests == (answer.kv_bytes) // answer.layout.request_bytes(32_768)


def test_pure_windows_reach_any_context_in_constant_memory() -> None:
    typed = Shapes("typed", (LayerKind(4, Span.sliding(64), 4, 2, 32, 32),))
    answer = solve(typed, Question(kv_bytes=Layout(typed).request_bytes(10_000), requests=1))
    assert answer.context > 10**9


def test_a_reference_window_pays_for_its_prompt() -> None:
    """A longer answer costs nothing, a longer prompt does; one prompt that fills the context must fit."""
    ocr = shapes("unlimited-ocr")
    sizes = [Layout(ocr).held_bytes(context, 4096) for context in (8192, 16_384, 32_768)]
    assert len(set(sizes)) == 1
    assert Layout(ocr).held_bytes(16_384, 8192) > sizes[0]
    answer = solve(ocr, Question(kv_bytes=2 * G, context=16_384, answer=8192))
    assert answer.requests == 2 * G // Layout(ocr).held_bytes(16_384, 8192)
    assert Layout(ocr).needed_bytes(16_384, 8192, 1) == Layout(ocr).request_bytes(16_384)


def test_weights_in_bytes() -> None:
    count = WeightCount(dense=1000, head=100, embed=100)
    assert [weight_bytes(count, kind) for kind in ("float32", "bfloat16", "int8", "int4")] == [4800, 2400, 1375, 1000]


def test_experts_that_a_step_reads() -> None:
    count = WeightCount(dense=10, head=5, experts=800, num_experts=8, used=2)
    assert (count.total, count.active) == (815, 215)
    assert count.touched(1) == pytest.approx(215)
    assert count.touched(1000) == pytest.approx(815)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (Question(context=0), "--context"),
        (Question(requests=0), "--concurrency"),
        (Question(page_size=0), "--page-size"),
        (Question(answer=0), "--answer"),
        (Question(memory_bytes=G, kv_bytes=G), "give one"),
    ],
)
def test_what_cannot_be_is_refused(question: Question, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        solve(shapes(), question)


def test_a_context_beyond_the_model_s_own_is_planned_and_told() -> None:
    answer = solve(shapes(), Question(context=200_000))
    assert (answer.fits, answer.context, answer.beyond) == (True, 200_000, 200_000 - 131_072)
    assert solve(shapes(), Question(context=131_072)).beyond == 0
    typed = Shapes("typed", (LayerKind(1, Span.full(), 1, 1, 8, 8),))  # nobody knows what it was made for
    assert solve(typed, Question(context=200_000)).beyond == 0


def test_pools_without_room_for_a_request_are_empty() -> None:
    scout, known = shapes("llama-4-scout"), Question(kv="bfloat16", context=32_768, requests=1)
    least = solve(scout, known).needed_bytes
    assert all(solve(scout, replace(known, kv_bytes=least)).pages)
    for less in (0, 10**9, least - 1):
        assert solve(scout, replace(known, kv_bytes=less)).pages == (0, 0)


def test_unknown_weights_need_a_number_or_the_pools_alone() -> None:
    with pytest.raises(ConfigError, match="--params"):
        solve(shapes("gemma-4-e2b"), Question(memory_bytes=G))
    assert solve(shapes("gemma-4-e2b"), Question(kv_bytes=G)).requests > 0


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000))
def test_largest_finds_the_last_that_holds(last: int, known: int, limit: int) -> None:
    if known <= last and known <= limit:
        assert largest(lambda n: n <= last, known, limit) == min(last, limit)


SPANS = [Span.full(), Span.sliding(50), Span.sliding(40, 5), Span.chunked(64), Span(SpanKind.REFERENCE, 30)]


@given(
    st.lists(st.sampled_from(SPANS), min_size=1, max_size=3, unique=True),
    st.integers(1, 400),
    st.integers(1, 400),
    st.integers(1, 9),
    st.integers(1, 20),
)
def test_needed_bytes_are_the_least(spans: list[Span], context: int, answer: int, requests: int, page: int) -> None:
    kinds = tuple(LayerKind(1 + i, span, 2, 1, 8, 8) for i, span in enumerate(spans))
    layout = Layout(Shapes("typed", kinds), page_size=page)
    prompt = max(context - answer, 1)
    need = layout.needed_bytes(context, prompt, requests)
    assert layout.runs(context, prompt, requests, need)
    assert not layout.runs(context, prompt, requests, need - 1)
    assert layout.most_requests(context, prompt, need) >= requests
    assert layout.held_bytes(context, prompt) <= layout.request_bytes(context) <= layout.uniform_bytes(context)
