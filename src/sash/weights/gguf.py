"""Weights of a GGUF file under sash's names, decoded, in the row order that half-split rope wants."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from sash.spec.ggml import BLOCKS
from sash.spec.gguf import GgufHeader, open_gguf
from sash.spec.model import ModelSpec
from sash.weights.check import check_weights
from sash.weights.dequant import dequantize
from sash.weights.load import Progress

TOP_NAMES: Mapping[str, str] = {
    "token_embd.weight": "embed",
    "output_norm.weight": "final_norm",
    "output.weight": "head",
}
BLOCK_NAMES: Mapping[str, str] = {
    "attn_norm.weight": "attn_norm",
    "attn_q.weight": "q",
    "attn_k.weight": "k",
    "attn_v.weight": "v",
    "attn_output.weight": "o",
    "attn_q.bias": "q_bias",
    "attn_k.bias": "k_bias",
    "attn_v.bias": "v_bias",
    "attn_output.bias": "o_bias",
    "attn_q_norm.weight": "q_norm",
    "attn_k_norm.weight": "k_norm",
    "post_attention_norm.weight": "post_attn_norm",
    "ffn_norm.weight": "mlp_norm",
    "ffn_gate.weight": "gate",
    "ffn_up.weight": "up",
    "ffn_down.weight": "down",
    "post_ffw_norm.weight": "post_mlp_norm",
    "ffn_gate_inp.weight": "router",
    "ffn_gate_exps.weight": "gate",
    "ffn_up_exps.weight": "up",
    "ffn_down_exps.weight": "down",
}
# Tables of rope frequencies: the spec reads or replaces them.
NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight", "attn_rot_embd.weight")


@dataclass(frozen=True, slots=True)
class Part:
    """Rows ``first`` to ``first + shape[0]`` of a file's tensor, which become one canonical tensor.

    ``heads`` above 0: the rows of each head are stored in interleaved-rope order and have to be regrouped.
    """

    source: str
    shape: tuple[int, ...]
    first: int = 0
    heads: int = 0


def load_gguf(
    path: str | Path,
    spec: ModelSpec,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """Decode every tensor that ``expected_weights(spec)`` names.

    Args:
        path: a .gguf file.
        spec: the model, as ``spec_from_gguf`` describes it.
        dtype: of the answer: float32, bfloat16 or float16.
        device: where the tensors go; one at a time passes through host memory.
        progress: called after each tensor with ("weights", bytes read, bytes in all).

    Returns:
        Canonical name to tensor; linear weights are [out, in].

    Raises:
        ModelError: damaged header, an undecodable type, or one list of all missing, unexpected, wrongly shaped and
            truncated tensors.
    """
    header = open_gguf(path, partial=True)
    parts = map_tensors(header, spec)
    check_weights(
        {name: part.shape for name, part in parts.items()},
        spec,
        source=str(path),
        names={name: part.source for name, part in parts.items()},
        truncated=[n for n, part in parts.items() if part.source in header.truncated],
    )
    sizes = {name: _row_bytes(header, part) * part.shape[0] for name, part in parts.items()}
    total, done, weights = sum(sizes.values()), 0, {}
    with _one_thread():
        for name, part in parts.items():
            weights[name] = _decode(header, part, dtype).to(device)
            done += sizes[name]
            if progress is not None:
                progress("weights", done, total)
    return weights


@contextmanager
def _one_thread() -> Iterator[None]:
    """Decoding is thousands of short operations: on a busy machine their barriers cost a hundred times the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def map_tensors(header: GgufHeader, spec: ModelSpec) -> dict[str, Part]:
    """Canonical names and where their rows lie; a tensor without a canonical name keeps its own."""
    arch = header.get("general.architecture")
    parts: dict[str, Part] = {}
    for source, tensor in header.tensors.items():
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", source)
        index, own = (int(match[1]), match[2]) if match else (-1, source)
        if own in NOT_WEIGHTS:
            continue
        short = (BLOCK_NAMES if match else TOP_NAMES).get(own)
        prefix = f"layers.{index}." if match else ""
        if not 0 <= index < len(spec.layers) and match:
            parts[source] = Part(source, tensor.shape)
        elif arch == "phi3" and match and own in ("attn_qkv.weight", "ffn_up.weight"):
            parts |= {prefix + n: p for n, p in _split(source, own, tensor.shape, spec, index).items()}
        elif short is None:
            parts[source] = Part(source, tensor.shape)
        else:
            layer = spec.layers[index] if match else None
            heads = 0
            if arch == "llama" and layer is not None:
                heads = {"q": layer.num_heads, "k": layer.num_kv_heads}.get(short.removesuffix("_bias"), 0)
            parts[prefix + short] = Part(source, tensor.shape, heads=heads)
    return parts


def _split(source: str, own: str, shape: tuple[int, ...], spec: ModelSpec, index: int) -> dict[str, Part]:
    """Phi-3's fused rows: q, k and v in one tensor, gate and up in another."""
    layer = spec.layers[index]
    if own == "ffn_up.weight":
        rows = {"gate": layer.mlp.intermediate_size, "up": shape[0] - layer.mlp.intermediate_size}
    else:
        q, k = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        rows = {"q": q, "k": k, "v": shape[0] - q - k}
    parts, first = {}, 0
    for name, count in rows.items():
        parts[name] = Part(source, (count, *shape[1:]), first)
        first += count
    return parts


def _row_bytes(header: GgufHeader, part: Part) -> int:
    """Stored bytes of one index of the first dimension."""
    block, size = BLOCKS[header.tensors[part.source].type]
    elements = prod(part.shape[1:])
    # A vector of single-element blocks has rows of one element; quantised vectors don't occur.
    return elements // block * size if len(part.shape) > 1 else size // block


def _decode(header: GgufHeader, part: Part, dtype: torch.dtype) -> Tensor:
    row = _row_bytes(header, part)
    data = header.tensor_bytes(part.source)[part.first * row : (part.first + part.shape[0]) * row]
    out = torch.empty(part.shape, dtype=dtype)
    dequantize(data, header.tensors[part.source].type, out)
    return _regroup(out, part.heads) if part.heads else out


def _regroup(rows: Tensor, heads: int) -> Tensor:
    """Rows (2i, 2i + 1) of each head, as llama.cpp's converter interleaves them, back to (i, i + half)."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
