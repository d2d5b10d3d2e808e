"""Every family through the paged engine: log-probabilities of prompt and answer against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from tests.families import FAMILIES, MAX_TEXT, VOCAB, build, oracle_logits, tokens

from sash.engine.build import build_core
from sash.engine.frontend import Frontend
from sash.engine.outputs import PositionLogprobs, RequestOutput
from sash.spec.config import EngineConfig
from sash.spec.load import load_spec
from sash.spec.locate import locate
from sash.spec.model import ModelSpec
from sash.spec.sampling import MAX_LOGPROBS, SamplingParams

# How the prompt is cut, and what it is kept in: options and the most rows a step may have.
SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 7, "max_num_seqs": 4, "page_size": 4},
    {"page_size": 1, "chunked_prefill_size": 3, "hybrid_kvcache_ratio": 0.5},
    {"page_size": 5, "chunked_prefill_size": 1, "disable_hybrid_swa_memory": True},
    {"page_size": 2, "chunked_prefill_size": 11, "deterministic": True},
]
# Models whose layers all see everything still decode some steps.
FULL_STEPS = 12


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    return build(request.param, tmp_path)


def lengths(spec: ModelSpec) -> tuple[int, int]:
    """Prompt tokens, and answer tokens that decode twice the widest window."""
    total = min(MAX_TEXT, spec.max_position)
    windows = [layer.span.window for layer in spec.layers if layer.span.bounded]
    steps = min(2 * max(windows, default=FULL_STEPS // 2), total // 2) + 1
    return total - steps, steps


def answer(folder: Path, options: dict[str, Any]) -> RequestOutput:
    """A greedy answer with the log-probabilities of every position over (nearly) the whole vocabulary."""
    config = EngineConfig(
        dtype="float32", max_model_len=_model_len(folder), kv_cache_memory_bytes=10**7, debug=True, **options
    )
    built = build_core(folder, config)
    prompt_tokens, steps = lengths(built.spec)
    front = Frontend(built.spec, None, seed=0)
    params = SamplingParams(
        max_tokens=steps, temperature=0, ignore_eos=True, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS
    )
    request = front.open(tokens(3, prompt_tokens).tolist(), params)
    built.core.add(request.message)
    front.started(request)
    while not request.whole.finished:
        for update in built.core.step():
            front.take(update)
    assert request.whole.outputs[0].finish_reason == "length", request.whole.outputs[0]
    assert len(request.whole.outputs[0].token_ids) == steps
    return request.whole


def _model_len(folder: Path) -> int:
    return min(MAX_TEXT, load_spec(locate(folder)).max_position)


@pytest.mark.parametrize(("quantization", "used"), [("auto", "none"), ("int8", "int8")])
def test_the_line_of_a_start_names_what_is_in_use(
    quantization: str, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SASH_KERNELS", "torch")
    _, folder = build("gemma3", tmp_path)
    with capture_logs() as lines:
        build_core(folder, EngineConfig(max_model_len=16, kv_cache_memory_bytes=1 << 20, quantization=quantization))
    ready = next(line for line in lines if line["event"] == "ready")
    assert ready["quantization"] == used


def worst_difference(got: list[PositionLogprobs], wanted: torch.Tensor) -> float:
    """Of log-probabilities by token id, against wanted [T, V]."""
    worst = 0.0
    for position, row in zip(got, wanted, strict=True):
        assert len(position) >= VOCAB - 1
        ids = list(position)
        values = torch.tensor([position[i].logprob for i in ids])
        worst = max(worst, (values - row[ids]).abs().max().item())
    return worst


def test_every_position_of_prompt_and_answer_agrees_with_transformers(family: tuple[Any, Path]) -> None:
    model, folder = family
    for options in SETTINGS:
        whole = answer(folder, options)
        output = whole.outputs[0]
        assert whole.prompt_logprobs is not None and output.logprobs is not None
        scored = [p for p in whole.prompt_logprobs if p is not None]
        assert len(scored) == len(whole.prompt_token_ids) - 1
        logits = oracle_logits(model, torch.tensor([*whole.prompt_token_ids, *output.token_ids[:-1]]))
        worst = worst_difference([*scored, *output.logprobs], logits.log_softmax(-1))
        tolerance = 1e-4 * max(1.0, logits.abs().max().item())
        assert worst <= tolerance, f"{options}: log-probabilities differ by {worst:.2e}, more than {tolerance:.2e}"
        best = logits.topk(2)
        for token, values, ids in zip(
            output.token_ids, *(x[len(whole.prompt_token_ids) - 1 :].tolist() for x in best), strict=True
        ):
            assert token == ids[0] or values[0] - values[1] < 2 * tolerance, options
