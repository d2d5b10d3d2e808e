from __future__ import annotations

import pytest
from tests.real_models import real_model

from sash import LLM

# Seats and bytes for the oracle's 20 prompts at once, in float32, without a preemption.
SEATS = {"max_num_seqs": 20, "kv_cache_memory_bytes": 1_000_000_000}


@pytest.fixture(scope="session")
def gemma() -> LLM:
    """Gemma 3 270M in float32."""
    real_model("gemma3-270m")
    return LLM("gemma3-270m", dtype="float32", **SEATS)


@pytest.fixture(scope="session")
def gemma_bf16() -> LLM:
    """The same in bf16."""
    real_model("gemma3-270m")
    return LLM("gemma3-270m", dtype="bfloat16", quantization="none", **SEATS)


@pytest.fixture(scope="session")
def gemma_int8() -> LLM:
    """The same with int8 weights and activations."""
    real_model("gemma3-270m")
    return LLM("gemma3-270m", dtype="bfloat16", quantization="int8", **SEATS)


@pytest.fixture(scope="session")
def smollm2() -> LLM:
    """SmolLM2 135M Instruct in float32."""
    real_model("smollm2-135m")
    return LLM("smollm2-135m", dtype="float32", **SEATS)
