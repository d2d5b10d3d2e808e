"""Attention over pages: every version against the reference, and the reference against a masked product."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
import torch
from tests.ops.attention_cases import Call, Part, assert_close, dense, make_call, native_versions

from sash.ops import attention_reference, attention_torch, fixed
from sash.spec.span import BoundSpan, Span, SpanKind

OPS = {"torch": attention_torch.attention, "fixed": fixed.attention, **native_versions()}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


def random_span(random: Random) -> BoundSpan:
    window = random.choice([1, 2, 3, 5, 8, 13, 40])
    prompt = random.randint(1, 40)
    return random.choice(
        [
            Span.full(),
            Span.sliding(window),
            Span.sliding(window, sinks=random.choice([1, 3, 4, 9])),
            Span.chunked(window),
            Span(SpanKind.REFERENCE, window),
            Span(SpanKind.PREFILL_WINDOW, window),
        ]
    ).bind(prompt)


def random_part(random: Random) -> Part:
    """A chunk with or without a past, a narrowed chunk, or a decoding row in hand or in the pool."""
    bound, extra = random_span(random), random.choice([0, 0, 2])
    start = random.choice([0, 0, random.randint(1, 60)])
    count = random.choice([1, 1, 2, 5, 17, 33])
    end = start + count
    kind = random.choice(["chunk", "chunk", "narrow", "pool", "pool", "none"])
    if kind == "pool":
        return Part(bound, end - 1, end - 1, end, hand=False, extra=extra)
    first = {"chunk": start, "narrow": random.randint(start, end - 1), "none": end}[kind]
    return Part(bound, start, first, end, extra=extra)


def random_call(seed: int, dtype: torch.dtype, stored: torch.dtype | None = None) -> Call:
    random = Random(seed)
    heads, folded = random.randint(1, 3), random.randint(1, 5)
    dim = random.choice([4, 7, 8, 20, 40, 64, 72])
    sinks = None
    if random.random() < 0.4:
        sinks = torch.tensor([random.choice([-math.inf, -3.0, 0.5, 6.0]) for _ in range(heads * folded)], dtype=dtype)
    return make_call(
        [random_part(random) for _ in range(random.randint(1, 6))],
        heads=heads,
        folded=folded,
        dim=dim,
        v_dim=random.choice([dim, dim, 12]),
        dtype=dtype,
        stored=stored,
        page=random.choice([1, 4, 16]),
        softcap=random.choice([0.0, 0.0, 3.0]),
        sink_logits=sinks,
    )


# Types of queries, and of K and V.
TYPES = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.float32, torch.int8),
    (torch.bfloat16, torch.int8),
    (torch.float32, torch.bfloat16),
]


@pytest.mark.parametrize("seed", range(100))
def test_versions_agree_on_mixed_batches(seed: int) -> None:
    """Heads 1 to 5 per group, D from 4 to 72, Dv different from D, every kind of span and of stored row."""
    dtype, stored = TYPES[seed % len(TYPES)]
    call = random_call(seed, dtype, stored)
    wanted = call.run(attention_reference.attention)
    assert_close(wanted, dense(call), dtype)
    for attention in OPS.values():
        assert_close(call.run(attention), wanted, dtype)
        # The second layer of the group finds what the first has derived from the batch.
        other = replace(call, q=-call.q, sink_logits=None)
        assert_close(other.run(attention), dense(other), dtype)


def test_the_reference_is_softmax_attention() -> None:
    """Against torch's own, on one request whose keys are all in hand."""
    call = make_call([Part(Span.full().bind(9), 0, 0, 9)], heads=1, folded=1)
    q, k, v = (x.transpose(0, 1) for x in (call.q, call.k, call.v))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=call.scale)
    got, lse = call.run(attention_reference.attention)
    torch.testing.assert_close(got.transpose(0, 1), wanted)
    scores = (q[0] @ k[0].T * call.scale).masked_fill(~torch.ones(9, 9).tril().bool(), -math.inf)
    torch.testing.assert_close(lse[:, 0], scores.logsumexp(-1))


LONG = {
    # No mask is needed for at least 1024 keys of each block.
    "full": Part(Span.full().bind(1), 1300, 1300, 1390),
    "window over 1024": Part(Span.sliding(1400).bind(1), 1700, 1700, 1790),
    "window over 1024 with sinks": Part(Span.sliding(1400, sinks=5).bind(1), 1700, 1700, 1790, extra=3),
    "reference window": Part(Span(SpanKind.REFERENCE, 1200).bind(100), 1500, 1500, 1540),
    "full, narrowed": Part(Span.full().bind(1), 1200, 1250, 1270),
    # More queries than one block holds, a window narrower than a block: some key blocks are masked whole.
    "many blocks": Part(Span.sliding(70, sinks=2).bind(1), 30, 30, 1200),
    "window wider than a key block": Part(Span.sliding(700).bind(1), 800, 800, 1400),
    "chunked": Part(Span.chunked(300).bind(1), 250, 250, 950),
    # One row over a run of slots, with and without keys that it must not see.
    "run": Part(Span.full().bind(1), 1099, 1099, 1100, hand=False, run=True),
    "run, partly seen": Part(Span.sliding(1050).bind(1), 1199, 1199, 1200, hand=False, run=True, extra=30),
    "gathered": Part(Span.full().bind(1), 1099, 1099, 1100, hand=False),
}


@pytest.mark.parametrize("folded", [1, 3])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize(("dtype", "stored"), TYPES, ids=str)
@pytest.mark.parametrize("name", LONG)
def test_long_contexts(name: str, dtype: torch.dtype, stored: torch.dtype | None, softcap: float, folded: int) -> None:
    call = make_call([LONG[name]], heads=1, folded=folded, dtype=dtype, stored=stored, page=16, softcap=softcap)
    wanted = dense(call)
    for name_of, attention in OPS.items():
        if folded == 3 or name_of != "fixed":
            assert_close(call.run(attention), wanted, dtype)


@pytest.mark.parametrize(("dtype", "stored"), TYPES, ids=str)
def test_decoding_rows_of_very_different_lengths(dtype: torch.dtype, stored: torch.dtype | None) -> None:
    """Short ones are padded to their bucket's longest; two long runs are read in place."""
    lengths = [1, 2, 5, 66, 67, 400, 1500, 1100, 3, 1200]
    parts = [Part(Span.full().bind(1), n - 1, n - 1, n, hand=False, run=n in (1500, 1200)) for n in lengths] + [
        Part(Span.full().bind(1), 20, 20, 31)
    ]
    call = make_call(parts, dtype=dtype, stored=stored, page=16)
    for attention in OPS.values():
        assert_close(call.run(attention), dense(call), dtype)


@pytest.mark.parametrize("attention", OPS.values(), ids=OPS)
def test_int8_rows_mean_the_same_in_hand_and_in_the_pool(attention: object) -> None:
    """However a prompt is cut, a query sees the same numbers."""
    span = Span.sliding(90, sinks=2).bind(1)
    cut = [make_call([Part(span, start, 299, 300)], dim=64, stored=torch.int8) for start in (0, 100, 250, 299)]
    cut.append(make_call([Part(span, 299, 299, 300, hand=False)], dim=64, stored=torch.int8))
    first, *others = [call.run(attention) for call in cut]  # type: ignore[arg-type]
    for other in others:
        assert_close(other, first, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("attention", native_versions().values(), ids=native_versions())
def test_what_a_call_leaves_in_memory_reaches_no_other(attention: object, dtype: torch.dtype) -> None:
    """A call on NaN, in hand and in the pool, and then one of odd sizes that use the same memory in part."""
    span = Span.full().bind(1)
    parts = [Part(span, 40, 40, 75), Part(span, 80, 80, 81, hand=False)]
    for stored in (None, torch.int8):
        spoilt = make_call(parts, heads=1, folded=3, dim=64, dtype=dtype, stored=stored)
        spoilt.q.fill_(math.nan)
        spoilt.run(attention)  # type: ignore[arg-type]
        for dim in (7, 33):
            call = make_call([parts[0], parts[1]], heads=1, folded=3, dim=dim, dtype=dtype, stored=stored)
            assert_close(call.run(attention), dense(call), dtype)  # type: ignore[arg-type]


def test_threads_split_and_merge_a_single_query() -> None:
    """Keys of one query in parts, twice over: the second run finds the counts as the first did."""
    torch.set_num_threads(3)
    for attention in native_versions().values():
        call = make_call([Part(Span.sliding(900, sinks=3).bind(1), 1200, 1200, 1201, hand=False)], heads=1, dim=40)
        for _ in range(2):
            assert_close(call.run(attention), dense(call), torch.float32)


@pytest.mark.parametrize("attention", OPS.values(), ids=OPS)
def test_a_sink_logit_takes_its_share(attention: object) -> None:
    """At -inf it takes nothing, at the log-sum-exp half, far above everything."""
    call = make_call([Part(Span.sliding(4).bind(1), 6, 6, 7, hand=False)], heads=1, folded=3)
    plain, lse = call.run(attention)  # type: ignore[arg-type]
    call.sink_logits = torch.tensor([-math.inf, float(lse[0, 1]), 200.0])
    got, same = call.run(attention)  # type: ignore[arg-type]
    assert torch.equal(same, lse)
    torch.testing.assert_close(got[0, 0], plain[0, 0])
    torch.testing.assert_close(got[0, 1], plain[0, 1] / 2)
    assert bool((got[0, 2] == 0).all())
