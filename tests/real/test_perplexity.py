"""Perplexity of a committed text through the paged engine, against transformers on the dequantised weights."""

from __future__ import annotations

import json
import math

import pytest
from tests.real.oracle import FIXTURES

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
