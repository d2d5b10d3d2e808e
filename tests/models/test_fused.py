"""The step in C++ against the decoder op by op, both on the same rounded weights."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.families import MAX_TEXT, build, tokens
from tests.scored import prompt_scores

from sash.engine.build import build_core
from sash.engine.runner import Runner
from sash.models.fused import FusedDecoder
from sash.ops import native
from sash.ops.paged import PagedBatch, Segment
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
        runner._fused, runner._logits = None, runner.decoder.logits
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


@dataclass
class InHand:
    """A step of one prompt that reads and writes no pool."""

    batch: PagedBatch
    early: None = None
    late: None = None


def test_two_threads_that_step_at_once_do_not_share_memory(tmp_path: Path) -> None:
    """One of them brings more rows each time, for which the buffers must grow."""
    _, folder = build("llama", tmp_path)

    def decoder() -> FusedDecoder:
        runner = build_core(folder, EngineConfig(dtype="float32", max_model_len=MAX_TEXT, max_num_seqs=1)).core.runner
        assert isinstance(runner, Runner) and runner._fused is not None
        return runner._fused

    def step(fused: FusedDecoder, rows: int) -> torch.Tensor:
        none = torch.empty(0, dtype=torch.int64)
        spans = [layer.span for layer in fused._decoder.spec.layers]
        segment = Segment(spans[0].bind(rows), 0, 0, rows, 0, 0, rows, none, none)
        views = [InHand(PagedBatch((segment,)))] * len(spans)
        return fused.forward(tokens(7, rows), torch.arange(rows), views)

    first = decoder()
    counts = range(100, 500, 10)
    wanted = {rows: step(first, rows) for rows in counts}
    wrong: list[int] = []

    def compare(fused: FusedDecoder, counts: Sequence[int]) -> None:
        wrong.extend(rows for rows in counts if not torch.equal(step(fused, rows), wanted[rows]))

    for _ in range(5):
        shared = decoder()
        threads = [threading.Thread(target=compare, args=(shared, own)) for own in ([100] * 100, counts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
