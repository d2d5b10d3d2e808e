"""Every option that can't work is refused at start, by name, with a value that would."""

from __future__ import annotations

import re

import pytest
from tests.equivalence.harness import tiny_spec

from sash.spec.config import EngineConfig, ResolvedConfig
from sash.spec.errors import ConfigError
from sash.spec.machine import Machine
from sash.spec.span import Span

HYBRID = [Span.sliding(20), Span.full(), Span.sliding(20)]
MACHINE = Machine(available_bytes=1 << 22, has_bf16=True)


def resolve(spans: list[Span] = HYBRID, machine: Machine = MACHINE, **options: object) -> ResolvedConfig:
    return EngineConfig(**options).resolve(tiny_spec(spans, max_position=4096), machine)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, "page_size must be at least 1, got 0; the default is 16"),
        ({"page_size": -3}, "page_size must be at least 1, got -3"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0; the default is 16"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be at least 1, got 0; the default is 512"),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens=8 .* use at least 16"),
        ({"max_model_len": 0}, "max_model_len must be above 0 or left out, got 0"),
        ({"max_model_len": 5000}, "max_model_len=5000 is longer .* use at most 4096"),
        ({"max_total_tokens": -1}, "max_total_tokens must be above 0 or left out, got -1"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes must be above 0 or left out"),
        ({"request_timeout_s": 0}, "request_timeout_s must be above 0 or left out"),
        ({"chunked_prefill_size": 0}, "chunked_prefill_size must be at least 1, or -1 for the whole step, got 0"),
        ({"chunked_prefill_size": -2}, "chunked_prefill_size must be at least 1, or -1"),
        ({"quantization": "int3"}, "quantization 'int3' is unknown; use auto, none, int8, int4"),
        ({"quantization": "int8", "deterministic": True}, "int8 can't run deterministic: use none or auto"),
        ({"quantization": "int4", "deterministic": True}, "int4 can't run deterministic: use none or auto"),
        ({"threads": 0}, "threads must be above 0 or left out, got 0"),
        ({"cpu_affinity": "0;1"}, "cpu_affinity must be different processor numbers such as 0,1; got '0;1'"),
        ({"cpu_affinity": ""}, "cpu_affinity must be different processor numbers such as 0,1; got ''"),
        ({"cpu_affinity": "1,01"}, "cpu_affinity must be different processor numbers such as 0,1; got '1,01'"),
        ({"cpu_affinity": "-1"}, "cpu_affinity must be different processor numbers such as 0,1; got '-1'"),
        ({"dtype": "int8"}, "dtype 'int8' is unknown; use auto, float32, bfloat16, float16"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype 'int4' is unknown; use auto, bfloat16, float32, int8"),
        ({"swa_kv_cache_dtype": "q8"}, "swa_kv_cache_dtype 'q8' is unknown; use auto, bfloat16, float32, int8"),
        ({"swa_full_tokens_ratio": 0.0}, r"swa_full_tokens_ratio must be above 0 and at most 1, got 0.0; 0.8"),
        ({"swa_full_tokens_ratio": 1.5}, r"swa_full_tokens_ratio must be above 0 and at most 1, got 1.5; 0.8"),
        ({"hybrid_kvcache_ratio": -0.1}, r"hybrid_kvcache_ratio must be between 0 \(uniform\) and 1"),
        ({"hybrid_kvcache_ratio": 1.5}, r"hybrid_kvcache_ratio must be between 0 \(uniform\) and 1 \(rings\), got 1.5"),
        ({"speculative": "eagle"}, "speculative 'eagle' is unknown; use none or ngram"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be 1 to 64, got 0; the default is 8, spec"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens must be 1 to 64, got 65"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min=0 must be at least 1 and at most prompt_lookup_max=5; the"),
        ({"prompt_lookup_max": 1}, "prompt_lookup_min=2 .* prompt_lookup_max=1; the defaults are 2 and 5"),
        (
            {"swa_full_tokens_ratio": 0.5, "disable_hybrid_swa_memory": True},
            "swa_full_tokens_ratio and disable_hybrid_swa_memory both set .* give one of them",
        ),
        (
            {"swa_full_tokens_ratio": 0.5, "hybrid_kvcache_ratio": 1.0},
            "swa_full_tokens_ratio and hybrid_kvcache_ratio both set",
        ),
        (
            {"hybrid_kvcache_ratio": 0.0, "disable_hybrid_swa_memory": True},
            "disable_hybrid_swa_memory and hybrid_kvcache_ratio both set",
        ),
        (
            {"swa_full_tokens_ratio": 0.01, "max_total_tokens": 512, "max_model_len": 64},
            "the window pool has 0 tokens .* of max_model_len=64 needs 48 .* give swa_full_tokens_ratio=0.1, or",
        ),
    ],
)  # fmt: skip
def test_options_that_cannot_work_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(**options)


@pytest.mark.parametrize(
    ("option", "value", "want"),
    [
        ("page_size", "16", "a whole number"),
        ("page_size", True, "a whole number"),
        ("max_num_seqs", 2.5, "a whole number"),
        ("max_model_len", 1.5, "a whole number"),
        ("seed", None, "a whole number"),
        ("dtype", None, "a name"),
        ("deterministic", 1, "True or False"),
        ("swa_full_tokens_ratio", "x", "a number"),
        ("request_timeout_s", False, "a number"),
        ("request_timeout_s", float("nan"), "a number"),
        ("swa_full_tokens_ratio", float("nan"), "a number"),
        ("hybrid_kvcache_ratio", float("nan"), "a number"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(option: str, value: object, want: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} must be {want}, got"):
        resolve(**{option: value})


def test_the_named_ratio_works() -> None:
    resolve(swa_full_tokens_ratio=0.1, max_total_tokens=512, max_model_len=64)
    with pytest.raises(ConfigError):
        resolve(swa_full_tokens_ratio=0.09, max_total_tokens=512, max_model_len=64)


@pytest.mark.parametrize("spans", [HYBRID, [Span.full()], [Span.sliding(20)], [Span.sliding(20), Span.sliding(90, 4)]])
@pytest.mark.parametrize("ratio", [None, 0.0, 0.3])
@pytest.mark.parametrize("option", ["kv_cache_memory_bytes", "max_total_tokens"])
def test_a_pool_smaller_than_one_request_is_refused_and_the_named_value_works(
    option: str, ratio: float | None, spans: list[Span]
) -> None:
    given: dict[str, object] = {"max_model_len": 500, "hybrid_kvcache_ratio": ratio, "max_num_seqs": 4}
    with pytest.raises(ConfigError, match=f"needs .* give {option} of at least") as refused:
        resolve(spans, **given, **{option: 17})
    found = re.search(rf"{option} of at least (\d+)", str(refused.value))
    assert found is not None
    least = int(found[1])
    config = resolve(spans, **given, **{option: least})
    assert all(have >= need for have, need in zip(config.pages, config.demand.request_pages(), strict=True))
    page = 16 if option == "max_total_tokens" else 1
    with pytest.raises(ConfigError, match="or lower max_model_len"):
        resolve(spans, **given, **{option: least - page})


def test_exactly_the_least_starts_and_one_page_less_does_not() -> None:
    least = resolve(max_model_len=64, max_num_seqs=1)
    assert least.pages == least.demand.request_pages() == (3, 4)
    resolve(max_model_len=64, max_total_tokens=64)
    with pytest.raises(ConfigError, match="the full pool has 48 tokens"):
        resolve(max_model_len=64, max_total_tokens=63)


def test_defaults_and_their_reasons() -> None:
    config = resolve()
    assert (config.dtype, config.chunk, config.max_model_len) == ("bfloat16", 512, 4096)
    assert resolve(machine=Machine(1 << 22, False)).dtype == "float32"
    assert any("a quarter of the 0.00 GiB" in r for r in config.reasons)
    assert sum(config.pool_bytes()) <= MACHINE.available_bytes // 4
    assert any(r.startswith("dtype bfloat16") for r in config.reasons)


def test_a_length_nobody_gave_is_shortened_to_what_fits_with_a_line() -> None:
    config = resolve(kv_cache_memory_bytes=20_000)
    assert 0 < config.max_model_len < 4096
    assert any(f"max_model_len {config.max_model_len}: shortened from 4096" in r for r in config.reasons)
    with pytest.raises(ConfigError, match="give kv_cache_memory_bytes"):
        resolve(kv_cache_memory_bytes=20_000, max_model_len=config.max_model_len + 16)
    with pytest.raises(ConfigError, match="max_model_len=1 needs"):
        resolve(kv_cache_memory_bytes=10)


@pytest.mark.parametrize(("given", "chunk"), [(None, 64), (-1, 64), (7, 7), (64, 64), (1000, 64)])
def test_the_prefill_chunk_is_at_most_the_step(given: int | None, chunk: int) -> None:
    assert resolve(chunked_prefill_size=given, max_num_batched_tokens=64).chunk == chunk


def test_window_flags_without_windows_are_ignored_with_a_line() -> None:
    for name in ("swa_full_tokens_ratio", "hybrid_kvcache_ratio", "disable_hybrid_swa_memory"):
        config = resolve([Span.full()], max_model_len=64, **{name: True if name[0] == "d" else 0.5})
        assert f"{name} is ignored: the model has no window layers" in config.reasons
    pure = resolve([Span.sliding(20)], max_model_len=64, swa_full_tokens_ratio=0.5)
    assert any("there is no full pool" in r for r in pure.reasons)


def test_a_budget_that_sizes_nothing_is_ignored_with_a_line() -> None:
    config = resolve(max_model_len=64, max_total_tokens=640, kv_cache_memory_bytes=1)
    assert config.pages == resolve(max_model_len=64, max_total_tokens=640).pages
    assert "kv_cache_memory_bytes is ignored: max_total_tokens sizes the pools" in config.reasons
    assert not any("KV budget" in r for r in config.reasons)


@pytest.mark.parametrize("option", ["kv_cache_memory_bytes", "max_total_tokens"])
def test_pools_larger_than_the_free_memory_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}=1000000000 makes pools of .* bytes, but only 4194304 are free"):
        resolve(max_model_len=4096, max_num_seqs=1000, max_num_batched_tokens=1000, **{option: 10**9})
    resolve(max_model_len=4096, max_num_seqs=1000, max_num_batched_tokens=1000)


def test_the_pool_line() -> None:
    ratio = resolve(max_model_len=64, swa_full_tokens_ratio=0.5, max_total_tokens=1600)
    assert ratio.pool_line().startswith(
        "Use sliding window memory pool. full_layer_tokens=1600, swa_layer_tokens=800 (window "
    )
    two = resolve([Span.sliding(20), Span.sliding(40), Span.full()], max_model_len=64, max_num_seqs=1)
    assert "full_layer_tokens=64, swa_layer_tokens=[48, 64] (" in two.pool_line()
    assert (
        resolve([Span.full()], max_model_len=64, max_num_seqs=1)
        .pool_line()
        .startswith("Use one growing memory pool. full_layer_tokens=64 (full ")
    )
    assert (
        "full_layer_tokens=0, swa_layer_tokens=48"
        in resolve([Span.sliding(20)], max_model_len=64, max_num_seqs=1).pool_line()
    )


def test_drafts_make_the_windows_rings_longer_and_nothing_else() -> None:
    plain, drafts = (
        resolve(max_model_len=128, max_num_seqs=2, speculative=s, num_speculative_tokens=20) for s in ("none", "ngram")
    )
    # Window 20 on pages of 16: ceil(19 / 16) + 1, and ceil((19 + 20) / 16) + 1.
    assert plain.demand.request_pages() == (3, 8) and drafts.demand.request_pages() == (4, 8)
    assert drafts.demand.slack == 20 and drafts.pages == (8, 16)
    assert "num_speculative_tokens is ignored: speculative is none" in plain.reasons
    assert not any("speculative" in reason for reason in drafts.reasons)
