"""Runs that must agree with each other: prefill and decode, alone and together, twice and fresh, limits of a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.equivalence import harness
from tests.equivalence.harness import Answer, Request, Rig, build, random_tokens, random_weights, tiny_spec

from sash.ops.registry import resolve_ops
from sash.spec.config import EngineConfig
from sash.spec.model import Activation, ModelSpec
from sash.spec.sampling import TokenLogprobs
from sash.spec.span import Span, SpanKind

W = 6
HYBRID = [Span.sliding(W), Span.full(), Span.sliding(W)]


def engine(spans: Sequence[Span] = HYBRID, chunk: int = 5, deterministic: bool = False, **layer: object) -> Rig:
    options = EngineConfig(
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=40,
        page_size=4,
        chunked_prefill_size=chunk,
        deterministic=deterministic,
    )
    return build(tiny_spec(spans, **layer), options)


def table(scores: Sequence[TokenLogprobs | None]) -> torch.Tensor:
    """Log-probabilities [positions, V], by token id."""
    out = torch.empty(len(scores), harness.VOCAB)
    for row, score in zip(out, scores, strict=True):
        assert score is not None
        row[list(score.top_ids)] = torch.tensor(score.top_logprobs)
    return out


def scores(answer: Answer) -> torch.Tensor:
    """All log-probabilities of an answer: prompt from position 1, then what was generated."""
    assert answer.prompt_logprobs is not None
    return table([*answer.prompt_logprobs[1:], *answer.logprobs])


MIX = [
    Request("a", random_tokens(3, 1), 14),
    Request("b", random_tokens(W - 1, 2), 20),
    Request("c", random_tokens(W, 3), 3),
    Request("d", random_tokens(W + 1, 4), 9, at_step=3),
    Request("e", random_tokens(3 * W, 5), 2 * W + 2, at_step=4),
]


def test_prefill_and_decode_give_a_position_the_same_scores() -> None:
    first = engine().run([Request("a", random_tokens(9, 1), 2 * W + 3)])["a"]
    text = (*first.prompt, *first.tokens)
    for chunk in (1, 5, W, 40):
        again = engine(chunk=chunk).run([Request("a", text, 1)])["a"]
        torch.testing.assert_close(scores(again)[: len(text) - 1], scores(first), rtol=0, atol=1e-4)


def test_a_row_of_a_batch_equals_its_solo_run() -> None:
    together = engine().run(MIX)
    for request in MIX:
        alone = engine().run([replace(request, at_step=0)])[request.name]
        assert together[request.name].tokens == alone.tokens
        torch.testing.assert_close(scores(together[request.name]), scores(alone), rtol=0, atol=1e-4)


@pytest.mark.parametrize("heads", [{}, {"learned_sinks": True}, {"softcap": 2.0}, {"v_head_dim": 12}])
def test_deterministic_is_bit_for_bit_the_same_alone_in_a_batch_and_in_any_chunks(heads: dict[str, object]) -> None:
    spans = [*HYBRID, Span.sliding(W, sinks=2), Span.chunked(W)]
    sampled = {"temperature": 1.0, "top_p": 0.9}
    mix = [replace(r, seed=i, sampling=sampled if i % 2 else {}) for i, r in enumerate(MIX)]
    together = engine(spans, deterministic=True, **heads).run(mix)
    for request in mix:
        for chunk in (1, 7):
            alone = engine(spans, chunk, deterministic=True, **heads).run([replace(request, at_step=0)])[request.name]
            assert together[request.name].tokens == alone.tokens
            assert torch.equal(scores(together[request.name]), scores(alone)), f"{request.name}, chunk {chunk}"


@pytest.mark.parametrize("activation", Activation)
def test_deterministic_activations_ignore_a_rows_place_and_the_threads(activation: Activation) -> None:
    """torch splits a large tensor between threads in the middle of a row, and rounds odd ends differently."""
    ops, threads = resolve_ops(deterministic=True), torch.get_num_threads()
    rows = torch.randn(37, 2 * 1111, generator=torch.Generator().manual_seed(1)) * 3
    try:
        torch.set_num_threads(2)
        together = ops.gated(rows, activation)
        alone = torch.cat([ops.gated(row, activation) for row in rows.split(1)])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(together, alone)


def test_deterministic_survives_preemption_bit_for_bit() -> None:
    calm, preempted = engine(deterministic=True).run(MIX), engine(deterministic=True)

    def preempt(core: harness.EngineCore, answers: harness.Answers) -> None:
        if core.counters.steps in (7, 12, 20) and core.scheduler.running:
            core.scheduler.preempt(core.scheduler.running[0])

    again = preempted.run(MIX, preempt)
    assert preempted.core.scheduler.num_preemptions >= 3
    for name, answer in calm.items():
        assert answer.tokens == again[name].tokens and torch.equal(scores(answer), scores(again[name]))


def test_an_engine_used_twice_equals_two_fresh_ones() -> None:
    used = engine()
    for requests in (MIX, list(reversed(MIX)), MIX[:2]):
        fresh, again = engine().run(requests), used.run(requests)
        for name, answer in fresh.items():
            assert answer.tokens == again[name].tokens and torch.equal(scores(answer), scores(again[name]))


def test_sampling_ignores_batch_mates() -> None:
    sampled = [replace(r, seed=7, sampling={"temperature": 1.3, "top_k": 20}) for r in MIX]
    together = engine().run(sampled)
    for request in sampled:
        alone = engine().run([replace(request, at_step=0)])[request.name]
        assert together[request.name].tokens == alone.tokens


def assert_same_runs(one: Rig, other: Rig) -> None:
    first, second = one.run(MIX), other.run(MIX)
    for name, answer in first.items():
        assert answer.tokens == second[name].tokens, name
        torch.testing.assert_close(scores(answer), scores(second[name]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kernels", ["torch", "reference"])
def test_a_sink_logit_of_minus_infinity_equals_plain_softmax(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_mass(spec: ModelSpec, seed: int = 0) -> dict[str, torch.Tensor]:
        weights = random_weights(replace(spec, layers=tuple(replace(x, learned_sinks=False) for x in spec.layers)))
        sinks = {f"layers.{i}.sinks": torch.full((x.num_heads,), -torch.inf) for i, x in enumerate(spec.layers)}
        return weights | (sinks if spec.layers[0].learned_sinks else {})

    monkeypatch.setenv("SASH_KERNELS", kernels)
    plain = engine()
    assert plain.run(MIX[:1])["a"].tokens != engine(learned_sinks=True).run(MIX[:1])["a"].tokens, "sinks have no effect"
    monkeypatch.setattr(harness, "random_weights", without_mass)
    assert_same_runs(plain, engine(learned_sinks=True))


@pytest.mark.parametrize("window", [64, 65, 128, 1000])
def test_a_window_of_at_least_the_length_equals_full(window: int) -> None:
    longest = max(len(r.prompt) + r.max_tokens for r in MIX)
    assert longest <= 64
    assert_same_runs(engine([Span.sliding(window)] * 3), engine([Span.full()] * 3))
    assert_same_runs(engine([Span.chunked(window)] * 3), engine([Span.full()] * 3))


def test_a_reference_window_over_a_short_prompt_is_a_window_with_sinks() -> None:
    """A prompt of one token stays visible; of no token, nothing would stay and the window is plain."""
    reference, sliding = Span(SpanKind.REFERENCE, W), Span.sliding(W)
    assert all(
        reference.bind(0).visible(q, k) == sliding.bind(0).visible(q, k) for q in range(4 * W) for k in range(4 * W)
    )
    asked = [Request("a", (5,), 3 * W), Request("b", (9,), 2 * W)]
    one, other = (
        engine([reference, Span.full(), reference]),
        engine([Span.sliding(W, 1), Span.full(), Span.sliding(W, 1)]),
    )
    first, second = one.run(asked), other.run(asked)
    for name, answer in first.items():
        assert answer.tokens == second[name].tokens
        torch.testing.assert_close(scores(answer), scores(second[name]), rtol=0, atol=1e-4)


def test_long_texts_take_the_block_paths() -> None:
    """Runs of neighbouring slots, blocks of many rows and keys that need no mask begin at about 1000 keys."""
    options = EngineConfig(max_model_len=1500, max_num_seqs=2, max_num_batched_tokens=1300, page_size=16)
    rig = build(tiny_spec([Span.sliding(300, sinks=40), Span.full()]), options)
    answers = rig.run([Request("a", random_tokens(1290, 1), 12), Request("b", random_tokens(40, 2), 12, at_step=1)])
    rig.assert_exact(answers)


@pytest.mark.parametrize("heads", [{}, {"softcap": 2.0}, {"learned_sinks": True, "v_head_dim": 12}])
@pytest.mark.parametrize("limit", [1, 4, 13])
def test_block_paths_at_every_size(limit: int, heads: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same paths on short texts: their thresholds lowered."""
    for name, value in (("_BLOCK_ROWS", 2 * limit), ("_MASK_FREE_KEYS", limit), ("_RUN_KEYS", limit)):
        monkeypatch.setattr(f"sash.ops.attention_torch.{name}", value)
    spans = [Span.sliding(20), Span.full(), Span.sliding(30, sinks=3), Span.chunked(24)]
    for chunk in (40, 17):
        rig = engine(spans, chunk, **heads)
        rig.assert_exact(rig.run([Request("long", random_tokens(75, 1), 25), *MIX]))


@pytest.mark.parametrize("start", [3, 8, 12])
def test_a_chunk_across_the_end_of_the_prompt_sees_what_a_prefill_window_opens(start: int) -> None:
    """Only a preempted request computes prompt and answer in one chunk."""
    rig = engine([Span(SpanKind.PREFILL_WINDOW, 4), Span.full()], chunk=start)

    def preempt(core: harness.EngineCore, answers: harness.Answers) -> None:
        if len(answers["a"].tokens) == 9 and not core.scheduler.num_preemptions:
            core.scheduler.preempt(core.scheduler.running[0])

    rig.assert_exact(rig.run([Request("a", random_tokens(14, 1), 20)], preempt))
    assert rig.core.scheduler.num_preemptions == 1
