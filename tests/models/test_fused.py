"""The step in C++ against the decoder op by op, both on the same rounded weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.families import MAX_TEXT, build, tokens
from tests.scored import prompt_scores

from sash.engine.build import build_core
from sash.engine.runner import Runner
from sash.ops import native
from sash.spec.config import EngineConfig

if native.load()[0] is None:
    pytest.skip("the C++ kernels are not built", allow_module_level=True)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SASH_KERNELS", "native")


def scores(folder: Path, seed: int, *, fused: bool, quantization: str, chunk: int) -> torch.Tensor:
    """Log-probabilities [T - 1] of a text's tokens, in chunks of so many."""
    options = EngineConfig(
        dtype="float32",
        quantization=quantization,
        max_model_len=MAX_TEXT,
        kv_cache_memory_bytes=10**7,
        max_num_batched_tokens=chunk,
        max_num_seqs=1,
    )
    built = build_core(folder, options)
    runner = built.core.runner
    assert isinstance(runner, Runner) and runner.op_by_op == ""
    if not fused:
        runner._fused, runner._logits = None, runner._decoder.logits
    return prompt_scores(built, tokens(seed, MAX_TEXT).tolist())


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("chunk", [1, 7, 40])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "cohere2", "olmo3", "qwen3"])
def test_rounded_weights_in_one_call_agree_with_op_by_op(name: str, chunk: int, kind: str, tmp_path: Path) -> None:
    """Every kind of block. In one text of four an activation lies on the edge of two numbers, and the last bit of
    a sum decides: the results of that text differ by a little. In most they agree."""
    _, folder = build(name, tmp_path)

    def agree(seed: int) -> bool:
        wanted = scores(folder, seed, fused=False, quantization=kind, chunk=chunk)
        off = (scores(folder, seed, fused=True, quantization=kind, chunk=chunk) - wanted).abs()
        rounding = (scores(folder, seed, fused=True, quantization="none", chunk=chunk) - wanted).abs()
        assert off.mean() < rounding.mean() / 2
        return bool(off.max() < 1e-4 < rounding.max())

    assert any(agree(seed) for seed in range(7, 12))
