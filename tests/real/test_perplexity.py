"""Perplexity of a committed text through the paged engine, against transformers on the dequantised weights."""

from __future__ import annotations

import json
import math

import pytest
from tests.real.oracle import FIXTURES
from tests.real_models import real_model

from sash import LLM, SamplingParams

pytestmark = pytest.mark.real

TOPICS = json.loads((FIXTURES / "gemma3_270m_topics_ids.json").read_text())
KNOWN = {int(count): value for count, value in TOPICS["perplexity_float32_dequantised"].items()}


def perplexity(llm: LLM, count: int) -> float:
    """exp of the mean surprise of all but the first of ``count`` ids, in chunks of 512."""
    assert llm.config.chunk == 512
    ids = TOPICS["ids"][:count]
    scores = llm.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=0))[0].prompt_logprobs
    assert scores is not None and scores[0] is None and len(scores) == count
    own = [position[token].logprob for position, token in zip(scores, ids, strict=True) if position is not None]
    assert len(own) == count - 1
    return math.exp(-sum(own) / len(own))


def test_of_2048_tokens_in_int8(gemma_int8: LLM) -> None:
    """Within half a percent; bf16 is within 0.1 %."""
    assert perplexity(gemma_int8, 2048) == pytest.approx(KNOWN[2048], rel=0.005)


@pytest.mark.e2e
@pytest.mark.timeout(1200)
def test_of_8192_tokens_in_int8(gemma_int8: LLM) -> None:
    assert perplexity(gemma_int8, 8192) == pytest.approx(KNOWN[8192], rel=0.005)


@pytest.mark.e2e
@pytest.mark.timeout(1200)
def test_of_2048_tokens_in_bf16(gemma_bf16: LLM) -> None:
    assert perplexity(gemma_bf16, 2048) == pytest.approx(KNOWN[2048], rel=0.003)


@pytest.mark.e2e
@pytest.mark.timeout(1200)
def test_of_8192_tokens_in_bf16(gemma_bf16: LLM) -> None:
    assert perplexity(gemma_bf16, 8192) == pytest.approx(KNOWN[8192], rel=0.003)


@pytest.mark.e2e
@pytest.mark.timeout(1200)
def test_of_2048_tokens_in_float32(gemma: LLM) -> None:
    assert perplexity(gemma, 2048) == pytest.approx(KNOWN[2048], rel=0.0005)


@pytest.mark.parametrize(
    "stored", [("int8", None), ("int8", "auto"), ("auto", "int8")], ids=["both", "full", "windows"]
)
@pytest.mark.e2e
@pytest.mark.timeout(1200)
def test_int8_rows_lose_next_to_nothing(stored: tuple[str, str | None]) -> None:
    """Float32 weights, in which the rounding of K and V is all that differs: up to 0.4 % to either side."""
    llm = _stored("float32", *stored)
    assert perplexity(llm, 2048) == pytest.approx(KNOWN[2048], rel=0.005)


def test_of_2048_tokens_in_bf16_with_int8_rows() -> None:
    """bfloat16 alone moves the value by 0.3 %."""
    assert perplexity(_stored("bfloat16", "int8", None), 2048) == pytest.approx(KNOWN[2048], rel=0.005)


def _stored(dtype: str, kv: str, window: str | None) -> LLM:
    real_model("gemma3-270m")
    return LLM(
        "gemma3-270m",
        dtype=dtype,
        kv_cache_dtype=kv,
        swa_kv_cache_dtype=window,
        max_model_len=4096,
        max_num_seqs=1,
        kv_cache_memory_bytes=200_000_000,
    )
