"""Every option on every kind of model: it starts and answers exactly, or is refused at start with the reason."""

from __future__ import annotations

import pytest
from tests.equivalence.harness import Request, build, random_tokens, tiny_spec
from tests.equivalence.test_sameness import scores

from sash.spec.config import EngineConfig
from sash.spec.errors import ConfigError
from sash.spec.span import Span, SpanKind

W = 6
MODELS = {
    "hybrid": [Span.sliding(W), Span.full()],
    "window": [Span.sliding(W)] * 2,
    "full": [Span.full()] * 2,
    "two windows": [Span.sliding(W), Span.sliding(3 * W, sinks=2)],
    "chunked": [Span.chunked(W), Span.full()],
    "reference": [Span(SpanKind.REFERENCE, W), Span.full()],
    "prefill window": [Span(SpanKind.PREFILL_WINDOW, W), Span.sliding(W)],
}
# Options that must start on every kind of model, and those that must be refused on every kind.
GOOD: list[dict[str, object]] = [
    {},
    {"max_num_seqs": 1},
    {"max_num_seqs": 4, "max_num_batched_tokens": 4},
    {"page_size": 1},
    {"page_size": 64},
    {"chunked_prefill_size": 1},
    {"chunked_prefill_size": -1},
    {"chunked_prefill_size": 100_000},
    {"max_total_tokens": 64},
    {"max_total_tokens": 10_000},
    {"kv_cache_memory_bytes": 50_000},
    {"swa_full_tokens_ratio": 1.0, "max_total_tokens": 128},
    {"swa_full_tokens_ratio": 0.8, "kv_cache_memory_bytes": 100_000},
    {"disable_hybrid_swa_memory": True},
    {"hybrid_kvcache_ratio": 0.0},
    {"hybrid_kvcache_ratio": 0.37},
    {"hybrid_kvcache_ratio": 1.0},
    {"deterministic": True},
    {"kv_cache_dtype": "int8"},
    {"kv_cache_dtype": "bfloat16", "swa_kv_cache_dtype": "int8"},
    {"swa_kv_cache_dtype": "bfloat16", "deterministic": True},
    {"seed": 12},
    {"request_timeout_s": 1000.0},
]
BAD: list[dict[str, object]] = [
    {"page_size": 0},
    {"max_num_seqs": 0},
    {"max_num_batched_tokens": 2},
    {"max_total_tokens": 16},
    {"kv_cache_memory_bytes": 500},
    {"swa_full_tokens_ratio": 1.5},
    {"hybrid_kvcache_ratio": 2.0},
    {"chunked_prefill_size": 0},
    {"dtype": "int4"},
    {"kv_cache_dtype": "int4"},
    {"swa_kv_cache_dtype": "fp8"},
]


def asked() -> list[Request]:
    return [Request("a", random_tokens(2 * W + 3, 1), 2 * W + 1), Request("b", random_tokens(W - 1, 2), 20, 1)]


@pytest.mark.parametrize("options", GOOD, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_options_that_start_answer_exactly(model: str, options: dict[str, object]) -> None:
    config = EngineConfig(**{"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16} | options)  # type: ignore[arg-type]
    rig = build(tiny_spec(MODELS[model]), config)
    rig.assert_exact(rig.run(asked()))


@pytest.mark.parametrize("options", BAD, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_options_that_cannot_work_are_refused_on_every_kind(model: str, options: dict[str, object]) -> None:
    config = EngineConfig(**{"max_model_len": 64, "max_num_seqs": 4} | options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=next(iter(options))):
        build(tiny_spec(MODELS[model]), config)


# Two units in the last place of a logit of 16 in bfloat16, of one of 32 in float16.
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.25), ("float16", 0.06)])
@pytest.mark.parametrize("model", ["hybrid", "window", "full", "two windows", "chunked"])
def test_other_precisions_agree_with_their_own_cold_run(model: str, dtype: str, tolerance: float) -> None:
    """Teacher-forced: what was generated in chunks and steps is scored again in one chunk by a fresh engine."""

    def engine(chunk: int) -> EngineConfig:
        return EngineConfig(
            dtype=dtype,
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            page_size=4,
            chunked_prefill_size=chunk,
        )

    spec = tiny_spec(MODELS[model])
    answers = build(spec, engine(5)).run(asked())
    for name, answer in answers.items():
        cold = build(spec, engine(-1)).run([Request(name, (*answer.prompt, *answer.tokens), 1)])[name]
        worst = (scores(answer) - scores(cold)[:-1]).abs().max()
        assert worst < tolerance, f"{name}: {worst:.3f}"
