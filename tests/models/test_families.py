"""The decoder against transformers, family by family, at every position."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.dense import OPS, attend_all, dense_attend
from tests.families import FAMILIES, MAX_TEXT, build, max_model_len, oracle_logits, tokens

from sash.models.decoder import Decoder
from sash.ops.base import Ops
from sash.spec.errors import ModelError
from sash.spec.hf import spec_from_hf
from sash.spec.model import ModelSpec
from sash.weights.load import load_weights

CPU = torch.device("cpu")
WINDOWED = [
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "cohere2",
    "olmo3",
    "exaone4",
    "gpt-oss",
]


@pytest.fixture(autouse=True)
def _no_grad() -> object:
    with torch.inference_mode():
        yield


def load(folder: Path, name: str, ops: Ops, dtype: torch.dtype = torch.float32) -> tuple[ModelSpec, Decoder]:
    spec = spec_from_hf(json.loads((folder / "config.json").read_text()))
    weights = load_weights(folder, spec, dtype, CPU)
    return spec, Decoder.of(spec, weights, ops, max_model_len=max_model_len(name))


def run(spec: ModelSpec, decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    hidden = decoder.forward(ids, torch.arange(len(ids)), attend_all(spec, len(ids)))
    return decoder.logits(hidden)


def assert_agrees(got: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = 1e-4 * max(1.0, wanted.abs().max().item())
    worst = (got.log_softmax(-1) - wanted.log_softmax(-1)).abs().max().item()
    assert worst <= tolerance, f"log-probabilities differ by {worst:.2e}, more than {tolerance:.2e}"


@pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_position_agrees_with_transformers(name: str, ops: Ops, tmp_path: Path) -> None:
    model, folder = build(name, tmp_path)
    ids = tokens(1, MAX_TEXT)
    spec, decoder = load(folder, name, ops)
    assert_agrees(run(spec, decoder, ids), oracle_logits(model, ids))


@pytest.mark.parametrize("name", WINDOWED)
def test_an_oracle_notices_a_window_that_is_one_off(name: str, tmp_path: Path) -> None:
    """The families are sharp: a window of W + 1 on one layer must break the agreement."""
    model, folder = build(name, tmp_path)
    ids = tokens(1, MAX_TEXT)
    spec, decoder = load(folder, name, OPS["torch_ops"])
    index = next(i for i, layer in enumerate(spec.layers) if layer.span.bounded)
    layer = spec.layers[index]
    wider = replace(layer, span=replace(layer.span, window=layer.span.window + 1))
    layers = (*spec.layers[:index], wider, *spec.layers[index + 1 :])
    with pytest.raises(AssertionError, match="log-probabilities differ"):
        assert_agrees(run(replace(spec, layers=layers), decoder, ids), oracle_logits(model, ids))


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen2", "gemma3", "cohere2", "olmo3", "exaone4", "gpt-oss"])
def test_narrowed_rows_equal_the_same_rows_of_a_full_run(name: str, tmp_path: Path) -> None:
    _, folder = build(name, tmp_path)
    spec, decoder = load(folder, name, OPS["torch_ops"])
    ids, count = tokens(2, 20), 20
    kept_at = {0: list(range(2, count)), 2: list(range(9, count)), len(spec.layers) - 1: [12, count - 1]}
    keys, queries, narrow = [], [], {}
    rows = list(range(count))
    for i in range(len(spec.layers)):
        keys.append(rows)
        if i in kept_at:
            narrow[i] = torch.tensor([rows.index(row) for row in kept_at[i]])
            rows = kept_at[i]
        queries.append(rows)
    hidden = decoder.forward(ids, torch.arange(count), dense_attend(spec, queries, keys), narrow)
    full = _full_with_dropped_keys(spec, decoder, ids, keys)
    torch.testing.assert_close(decoder.logits(hidden), full[[12, count - 1]], rtol=0, atol=1e-5)


def _full_with_dropped_keys(
    spec: ModelSpec, decoder: Decoder, ids: torch.Tensor, keys: list[list[int]]
) -> torch.Tensor:
    """All rows through all layers, where layer i sees only the keys of rows ``keys[i]``."""
    count = len(ids)
    narrowed = dense_attend(spec, [range(count)] * len(keys), keys)

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        out = narrowed(layer, q, k[keys[layer]], v[keys[layer]], sinks)
        # A row before every kept key sees nothing; it is not looked at again, but NaN would spread.
        return out.nan_to_num()

    return decoder.logits(decoder.forward(ids, torch.arange(count), attend))


def test_linear_layers_run_once_per_step_on_all_rows(tmp_path: Path) -> None:
    _, folder = build("gemma3", tmp_path)
    rows: list[int] = []

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows.append(x.shape[0])
        return OPS["torch_ops"].linear(x, weight, bias)

    spec, decoder = load(folder, "gemma3", replace(OPS["torch_ops"], linear=counted))
    decoder.forward(tokens(3, 11), torch.arange(11), attend_all(spec, 11))
    assert rows == [11] * 4 * len(spec.layers)


def test_each_expert_in_use_runs_once(tmp_path: Path) -> None:
    _, folder = build("mixtral", tmp_path)
    rows: list[int] = []

    def counted(x: torch.Tensor, activation: object) -> torch.Tensor:
        rows.append(x.shape[0])
        return OPS["torch_ops"].gated(x, activation)

    spec, decoder = load(folder, "mixtral", replace(OPS["torch_ops"], gated=counted))
    decoder.forward(tokens(3, 40), torch.arange(40), attend_all(spec, 40))
    assert len(rows) <= 4 * len(spec.layers)
    assert sum(rows) == 40 * 2 * len(spec.layers)


def test_a_second_run_gives_the_same_bits(tmp_path: Path) -> None:
    """Nothing of a step is kept, and in-place arithmetic doesn't reach the weights."""
    _, folder = build("gemma2", tmp_path)
    spec, decoder = load(folder, "gemma2", OPS["torch_ops"])
    first = run(spec, decoder, tokens(4, 12))
    assert torch.equal(first, run(spec, decoder, tokens(4, 12)))


@pytest.mark.parametrize("name", ["llama", "gemma3", "cohere2", "olmo3", "gpt-oss"])
def test_bfloat16_stays_close_with_a_float32_residual(name: str, tmp_path: Path) -> None:
    model, folder = build(name, tmp_path)
    ids = tokens(5, MAX_TEXT)
    spec, decoder = load(folder, name, OPS["torch_ops"], torch.bfloat16)
    got = run(spec, decoder, ids)
    assert got.dtype == torch.float32
    wanted = oracle_logits(model, ids).log_softmax(-1)
    off = (got.log_softmax(-1) - wanted).abs().mean().item()
    assert off < 0.1


@pytest.mark.parametrize("name", ["llama", "gemma3", "olmo3"])
def test_the_residual_stream_and_norms_are_float32_under_bfloat16(name: str, tmp_path: Path) -> None:
    _, folder = build(name, tmp_path)
    normed: set[torch.dtype] = set()
    multiplied: set[torch.dtype] = set()

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        normed.update((x.dtype, weight.dtype))
        return OPS["torch_ops"].rms_norm(x, weight, eps)

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        multiplied.update((x.dtype, weight.dtype))
        return OPS["torch_ops"].linear(x, weight, bias)

    ops = replace(OPS["torch_ops"], rms_norm=rms_norm, linear=linear)
    spec, decoder = load(folder, name, ops, torch.bfloat16)
    run(spec, decoder, tokens(6, 9))
    assert normed == {torch.float32}
    assert multiplied == {torch.bfloat16}


def test_weights_are_consumed_and_missing_ones_named(tmp_path: Path) -> None:
    _, folder = build("llama", tmp_path)
    spec = spec_from_hf(json.loads((folder / "config.json").read_text()))
    weights = load_weights(folder, spec, torch.float32, CPU)
    del weights["layers.2.o"], weights["head"]
    with pytest.raises(ModelError, match=r"head, layers\.2\.o"):
        Decoder.of(spec, weights, OPS["torch_ops"], max_model_len=64)
    weights = load_weights(folder, spec, torch.float32, CPU)
    Decoder.of(spec, weights, OPS["torch_ops"], max_model_len=64)
    assert not weights
