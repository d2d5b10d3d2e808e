"""The real Gemma with and without drafts: the same tokens, on prompts before, at and past its window of 512."""

from __future__ import annotations

import json

import pytest
from tests.real.grow import TOPICS
from tests.real_models import real_model

from sash import LLM, SamplingParams

pytestmark = [pytest.mark.real, pytest.mark.e2e, pytest.mark.timeout(1800)]

PROMPTS, TOKENS = 50, 48


def test_fifty_prompts_across_the_window_get_the_same_tokens() -> None:
    """float32, so that rounding, which depends on how many rows a product has, decides nothing."""
    real_model("gemma3-270m")
    text = json.loads(TOPICS.read_text())["ids"]
    # 465, 474, 483 … 906 tokens: the first cross the window while they decode.
    prompts = [text[i * 140 :][: 465 + 9 * i] for i in range(PROMPTS)]
    assert [len(prompts[0]), len(prompts[-1])] == [465, 906]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    answers = {}
    for speculative in ("none", "ngram"):
        llm = LLM(
            "gemma3-270m",
            dtype="float32",
            max_model_len=1000,
            max_num_seqs=10,
            kv_cache_memory_bytes=600_000_000,
            speculative=speculative,
        )
        answers[speculative] = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        stats = llm.stats()
    assert all(len(tokens) == TOKENS for tokens in answers["none"])
    assert answers["ngram"] == answers["none"]
    assert stats["accepted_tokens"] > PROMPTS
