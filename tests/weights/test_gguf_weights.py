"""Weights of GGUF files: names, values, row order, and one error for everything that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from tests.gguf_files import gguf_name, random_weights, write_gguf
from tests.real_models import real_model

from sash.spec.errors import ModelError
from sash.spec.gguf import open_gguf
from sash.spec.gguf_model import spec_from_gguf
from sash.spec.model import ModelSpec, expected_weights
from sash.weights.gguf import load_gguf

EMBED = {"token_embd.weight": np.zeros((8, 32), np.float32)}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: row i and i + half of a head become 2i and 2i + 1."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def build(tmp_path: Path, arch: str, keys: Mapping[str, Any] | None = None) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    """The spec of a small file and random weights for it, under canonical names."""
    spec = spec_from_gguf(open_gguf(write_gguf(tmp_path / "spec.gguf", arch, keys)))
    return spec, random_weights(spec)


def file_tensors(spec: ModelSpec, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors as a file of ``spec.architecture`` stores them."""
    out = {}
    for name, value in weights.items():
        short = name.rsplit(".", 1)[-1]
        if spec.architecture == "llama" and short in ("q", "k"):
            layer = spec.layers[int(name.split(".")[1])]
            value = interleave(value, layer.num_heads if short == "q" else layer.num_kv_heads)
        out[gguf_name(name)] = value
    return out


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gemma3", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float_weights_come_back_under_canonical_names(tmp_path: Path, arch: str, dtype: torch.dtype) -> None:
    spec, weights = build(tmp_path, arch, {"attention.key_length": 16})
    path = write_gguf(tmp_path / "m.gguf", arch, {"attention.key_length": 16}, file_tensors(spec, weights))
    loaded = load_gguf(path, spec, dtype)
    assert loaded.keys() == expected_weights(spec).keys()
    for name, want in weights.items():
        assert loaded[name].dtype == dtype
        torch.testing.assert_close(loaded[name], torch.from_numpy(want).to(dtype), rtol=0, atol=0)


def test_llama_rows_rotate_like_the_files_interleaved_rows(tmp_path: Path) -> None:
    """Scores after half-split rope on loaded rows equal those after interleaved rope on the file's rows."""
    spec, weights = build(tmp_path, "llama")
    tensors = file_tensors(spec, weights)
    loaded = load_gguf(write_gguf(tmp_path / "m.gguf", "llama", None, tensors), spec)
    x, layer = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)), spec.layers[0]
    angles = torch.arange(5.0)[:, None] / 10000 ** (torch.arange(0, 8, 2) / 8)

    def half_split(rows: torch.Tensor, heads: int) -> torch.Tensor:
        a, b = (x @ rows.T).view(5, heads, 2, 4).unbind(2)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), 2).flatten(2)

    def interleaved(rows: np.ndarray, heads: int) -> torch.Tensor:
        a, b = (x @ torch.from_numpy(rows).T).view(5, heads, 4, 2).unbind(3)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), 3).flatten(2)

    ours = [half_split(loaded[f"layers.0.{n}"], h) for n, h in (("q", layer.num_heads), ("k", layer.num_kv_heads))]
    file = [interleaved(tensors[f"blk.0.attn_{n}.weight"], h) for n, h in (("q", 4), ("k", 2))]
    scores = [torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) for q, k in (ours, file)]
    torch.testing.assert_close(scores[0], scores[1])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_quantised_weights_are_gguf_s_values(tmp_path: Path, kind: str) -> None:
    spec, weights = build(tmp_path, "gemma3")
    quant = GGMLQuantizationType[kind]
    types = {gguf_name(n): quant for n, w in weights.items() if w.ndim == 2}
    path = write_gguf(tmp_path / "m.gguf", "gemma3", None, file_tensors(spec, weights), types)
    loaded = load_gguf(path, spec)
    for name, values in weights.items():
        stored = gguf.quants.dequantize(gguf.quants.quantize(values, quant), quant) if values.ndim == 2 else values
        np.testing.assert_array_equal(loaded[name].numpy(), stored.reshape(values.shape), err_msg=name)


def test_phi3_fused_rows_are_split(tmp_path: Path) -> None:
    spec, weights = build(tmp_path, "phi3")
    fused = {}
    for name, value in weights.items():
        short = name.rsplit(".", 1)[-1]
        if short not in ("q", "k", "v", "gate", "up"):
            fused[gguf_name(name)] = value
    for i in range(len(spec.layers)):
        part = {n: weights[f"layers.{i}.{n}"] for n in ("q", "k", "v", "gate", "up")}
        fused[f"blk.{i}.attn_qkv.weight"] = np.concatenate([part["q"], part["k"], part["v"]])
        fused[f"blk.{i}.ffn_up.weight"] = np.concatenate([part["gate"], part["up"]])
    types = {n: GGMLQuantizationType.Q8_0 for n in fused if n.endswith("attn_qkv.weight")}
    loaded = load_gguf(write_gguf(tmp_path / "m.gguf", "phi3", None, fused, types), spec)
    for name, want in weights.items():
        exact = name.rsplit(".", 1)[-1] not in ("q", "k", "v")
        torch.testing.assert_close(loaded[name], torch.from_numpy(want), rtol=0, atol=0 if exact else 0.03)


def test_experts_are_one_tensor_each(tmp_path: Path) -> None:
    keys = {"expert_count": 4, "expert_used_count": 2, "block_count": 1}
    spec, weights = build(tmp_path, "llama", keys)
    tensors = file_tensors(spec, {n: w for n, w in weights.items() if n.rsplit(".", 1)[-1] != "router"})
    for short in ("gate", "up", "down"):
        tensors[f"blk.0.ffn_{short}_exps.weight"] = tensors.pop(f"blk.0.ffn_{short}.weight")
    tensors["blk.0.ffn_gate_inp.weight"] = weights["layers.0.router"]
    loaded = load_gguf(write_gguf(tmp_path / "m.gguf", "llama", keys, tensors), spec)
    for name, want in weights.items():
        np.testing.assert_array_equal(loaded[name].numpy(), want)


def test_tables_of_rope_factors_are_no_weights(tmp_path: Path) -> None:
    spec, weights = build(tmp_path, "llama")
    tensors = file_tensors(spec, weights) | {"rope_freqs.weight": np.ones(4, np.float32)}
    assert load_gguf(write_gguf(tmp_path / "m.gguf", "llama", None, tensors), spec).keys() == weights.keys()


def test_everything_wrong_is_in_one_error(tmp_path: Path) -> None:
    spec, weights = build(tmp_path, "gemma3")
    tensors = file_tensors(spec, weights)
    del tensors["blk.0.attn_q.weight"]
    tensors["blk.1.attn_k.weight"] = np.zeros((16, 64), np.float32)
    tensors = {
        "blk.0.surprise.weight": np.zeros(3, np.float32),
        "blk.9.attn_q.weight": np.zeros(3, np.float32),
    } | tensors
    path = write_gguf(tmp_path / "m.gguf", "gemma3", None, tensors)
    last = list(tensors)[-1]
    path.write_bytes(path.read_bytes()[: open_gguf(path).tensors[last].offset + 4])
    with pytest.raises(ModelError) as caught:
        load_gguf(path, spec)
    message = str(caught.value)
    assert "missing (1):\n    layers.0.q [32, 32]" in message
    assert "unexpected (2):\n    blk.0.surprise.weight [3]\n    blk.9.attn_q.weight [3]" in message
    assert "wrong shape (1):\n    layers.1.k (blk.1.attn_k.weight) is [16, 64], must be [16, 32]" in message
    assert f"({last})" in message.split("truncated (1):")[1]
    assert str(path) in message


def test_a_type_without_decoder_is_refused(tmp_path: Path) -> None:
    spec, weights = build(tmp_path, "llama", {"embedding_length": 256, "block_count": 1})
    tensors = file_tensors(spec, weights)
    path = write_gguf(tmp_path / "m.gguf", "llama", {"embedding_length": 256, "block_count": 1}, tensors)
    data = path.read_bytes()
    # F32 (0) to IQ4_NL (20) in the embedding's info: its name, 2 dimensions of 8 bytes, then the type.
    at = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    path.write_bytes(data[:at] + b"\x14" + data[at + 1 :])
    with pytest.raises(ModelError, match="IQ4_NL can't be decoded"):
        load_gguf(path, spec)


def test_progress_counts_up_to_the_whole(tmp_path: Path) -> None:
    spec, weights = build(tmp_path, "gemma3")
    path = write_gguf(tmp_path / "m.gguf", "gemma3", None, file_tensors(spec, weights))
    calls: list[tuple[str, int, int]] = []
    load_gguf(path, spec, progress=lambda *call: calls.append(call))
    assert {stage for stage, _, _ in calls} == {"weights"} and len(calls) == len(weights)
    total = sum(w.nbytes for w in weights.values())
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
    assert calls[-1][1:] == (total, total)


@pytest.mark.real
def test_gemma_equals_gguf() -> None:
    path = real_model("gemma3-270m")
    header = open_gguf(path)
    spec = spec_from_gguf(header)
    weights = load_gguf(path, spec, torch.bfloat16)
    exact = load_gguf(path, spec, torch.float32)
    for name, rows in (("token_embd.weight", 512), ("blk.3.attn_q.weight", 1024), ("blk.3.attn_output.weight", 640),
                       ("blk.3.ffn_down.weight", 640), ("blk.1.ffn_down.weight", 640), ("blk.1.attn_v.weight", 256),
                       ("output_norm.weight", 0)):  # fmt: skip
        tensor = header.tensors[name]
        canonical = {"token_embd.weight": "embed", "output_norm.weight": "final_norm"}.get(name) or (
            name.replace("blk", "layers").replace("attn_output", "o").replace("attn_", "").replace("ffn_", "")
        ).removesuffix(".weight")  # fmt: skip
        raw = np.frombuffer(header.tensor_bytes(name), np.uint8)
        if rows:
            raw = raw.reshape(tensor.shape[0], -1)[:rows]
            want = gguf.quants.dequantize(raw, GGMLQuantizationType(tensor.type.value))
            np.testing.assert_array_equal(exact[canonical][:rows].numpy(), want, err_msg=name)
        else:
            np.testing.assert_array_equal(exact[canonical].numpy(), raw.view(np.float32))
        torch.testing.assert_close(weights[canonical], exact[canonical].bfloat16(), rtol=0, atol=0)
