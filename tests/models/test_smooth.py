"""Smoothing: the same outputs from other weights, and less noise once those are rounded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.dense import OPS, attend_all
from tests.families import MAX_TEXT, build, max_model_len, tokens

from sash.models.decoder import Decoder
from sash.models.prepare import Weights
from sash.models.smooth import smooth
from sash.ops.registry import resolve_ops
from sash.spec.hf import spec_from_hf
from sash.spec.model import Activation, BlockKind, ModelSpec, NormKind
from sash.weights.load import load_weights

# Every kind of block, norm and MLP; biases of q, k, v, gate and up; grouped heads; ropes of one model and of two.
NAMES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "cohere2", "olmo3", "mixtral", "gpt-oss", "phi3"]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


def load(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelSpec, Weights]:
    _, path = build(name, folder)
    spec = spec_from_hf(json.loads((path / "config.json").read_text()))
    return spec, load_weights(path, spec, dtype, torch.device("cpu"))


def loud(spec: ModelSpec, weights: Weights) -> Weights:
    """The same model with a few loud channels before each product, as trained ones have: quiet weights read them."""
    out = {name: weight.clone() for name, weight in weights.items()}
    one = 1.0 if spec.norm is NormKind.RMS_PLUS_ONE else 0.0
    for i in range(len(spec.layers)):
        prefix = f"layers.{i}."
        readers = {"attn_norm": ["q", "k", "v"], "mlp_norm": ["gate", "up", "router"]}
        if spec.block is BlockKind.PARALLEL:
            readers["attn_norm"] += readers["mlp_norm"]
        for norm, names in readers.items():
            if prefix + norm in out:
                out[prefix + norm][[3, 17]] = (out[prefix + norm][[3, 17]] + one) * 30 - one
                for name in names:
                    if prefix + name in out:
                        out[prefix + name][..., [3, 17]] /= 30
        if not spec.layers[i].mlp.num_experts:
            for name in ("up", "up_bias"):
                if prefix + name in out:
                    out[prefix + name][[5, 20]] *= 20
            out[prefix + "down"][:, [5, 20]] /= 20
        # Dimension 5 of the last KV head, read by the last group of heads.
        layer = spec.layers[i]
        for name in ("v", "v_bias"):
            if prefix + name in out:
                out[prefix + name][5 - layer.v_head_dim] *= 20
        group = layer.num_heads // layer.num_kv_heads
        out[prefix + "o"].unflatten(1, (-1, layer.v_head_dim))[:, -group:, 5] /= 20
    return out


def logits(name: str, spec: ModelSpec, weights: Weights, quantization: str = "none") -> torch.Tensor:
    ops = OPS["torch_ops"] if quantization == "none" else resolve_ops(kernels="torch", quantization=quantization)
    decoder = Decoder.of(spec, dict(weights), ops, max_model_len=max_model_len(name))
    ids = tokens(1, MAX_TEXT)
    return decoder.logits(decoder.forward(ids, torch.arange(MAX_TEXT), attend_all(spec, MAX_TEXT)))


def smoothed(spec: ModelSpec, weights: Weights) -> Weights:
    out = dict(weights)
    smooth(spec, out, OPS["torch_ops"])
    return out


@pytest.mark.parametrize("name", NAMES)
def test_outputs_stay_the_same(name: str, tmp_path: Path) -> None:
    spec, weights = load(name, tmp_path)
    weights = loud(spec, weights)
    before = {key: weight.clone() for key, weight in weights.items()}
    wanted, after = logits(name, spec, weights), smoothed(spec, weights)
    torch.testing.assert_close(logits(name, spec, after), wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())
    # The given tensors are replaced, not changed: a file may be mapped behind them.
    assert all(torch.equal(weights[key], before[key]) for key in before)
    assert {key: weight.shape for key, weight in after.items()} == {key: w.shape for key, w in before.items()}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_rescaled(name: str, tmp_path: Path) -> None:
    """Everything that a norm, up or v of its own feeds; nothing else."""
    spec, weights = load(name, tmp_path)
    weights = loud(spec, weights)
    after = smoothed(spec, weights)
    changed = {key.split(".")[-1] for key in weights if not torch.equal(weights[key].float(), after[key].float())}
    wanted = {"v", "o"}
    if spec.block is not BlockKind.POST:
        wanted |= {"attn_norm", "q", "k", "v", "gate", "up"}
        wanted |= {"mlp_norm"} if spec.block is not BlockKind.PARALLEL else set()
    mlp = spec.layers[0].mlp
    if mlp.num_experts:
        wanted |= {"router"}
    elif mlp.activation is not Activation.CLAMPED_SWIGLU:
        wanted |= {"up", "down"}
    wanted |= {f"{part}_bias" for part in ("up", "v") if part in wanted and f"layers.0.{part}_bias" in weights}
    if mlp.num_experts:
        wanted -= {"up_bias"}
    assert changed == wanted


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_scales_are_powers_of_two(name: str, tmp_path: Path) -> None:
    """So that bfloat16 weights keep every digit."""
    spec, weights = load(name, tmp_path, torch.bfloat16)
    weights = loud(spec, weights)
    after = smoothed(spec, weights)
    for part in ("q", "up", "down", "o"):
        old, new = weights[f"layers.1.{part}"], after[f"layers.1.{part}"]
        ratio = (new.double() / old.double())[old != 0].log2()
        assert new.dtype is torch.bfloat16 and torch.equal(ratio, ratio.round())
    assert after["layers.1.attn_norm"].dtype is torch.float32


@pytest.mark.parametrize("name", ["llama", "gemma3", "cohere2", "mixtral"])
def test_loud_channels_cost_less(name: str, tmp_path: Path) -> None:
    spec, weights = load(name, tmp_path)
    weights = loud(spec, weights)
    exact = logits(name, spec, weights)
    plain = (logits(name, spec, weights, "int8") - exact).square().mean()
    after = (logits(name, spec, smoothed(spec, weights), "int8") - exact).square().mean()
    assert after < 0.7 * plain


def test_the_same_weights_are_smoothed_alike(tmp_path: Path) -> None:
    """What is kept on disk must be what another start would make."""
    spec, weights = load("gemma3", tmp_path)
    one, two = smoothed(spec, weights), smoothed(spec, weights)
    assert all(torch.equal(one[key], two[key]) for key in one)
