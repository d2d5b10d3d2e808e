"""Small GGUF files, written with gguf's own writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from sash.spec.model import ModelSpec, expected_weights

INVERSE = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "attn_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "post_attn_norm": "post_attention_norm.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
BASE = {
    "block_count": 6,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def write_gguf(
    path: Path,
    arch: str,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    types: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """A file with the metadata ``keys`` (``arch.`` is put before those without a known prefix) and tensors.

    Arrays are float32 and are quantised to the type in ``types``. A key whose value is None is left out.
    """
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in (BASE | dict(keys or {})).items():
        name = key if key.startswith(("general.", "tokenizer.", "split.")) else f"{arch}.{key}"
        if value is not None:
            _add(writer, name, value)
    if tensors is None:
        tensors = {"token_embd.weight": np.zeros((8, 32), np.float32)}
    for name, array in tensors.items():
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, np.ndarray):
        kind = {np.dtype("int32"): GGUFValueType.INT32, np.dtype("float32"): GGUFValueType.FLOAT32}[value.dtype]
        writer.add_key_value(name, value.tolist(), GGUFValueType.ARRAY, sub_type=kind)
    else:
        assert isinstance(value, Sequence)
        writer.add_array(name, value)


def random_weights(spec: ModelSpec, seed: int = 0) -> dict[str, np.ndarray]:
    """Canonical name to random float32 values of the expected shape."""
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(shape).astype(np.float32) for n, shape in expected_weights(spec).items()}


def gguf_name(canonical: str) -> str:
    """The name a GGUF file uses for a canonical tensor."""
    if not canonical.startswith("layers."):
        return INVERSE[canonical]
    _, index, short = canonical.split(".")
    return f"blk.{index}.{INVERSE[short]}"
