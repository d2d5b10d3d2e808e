"""GGUF metadata to ModelSpec: windows, ropes, scales, stop tokens, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.gguf_files import write_gguf
from tests.real_models import real_model

from sash.spec.errors import ModelError
from sash.spec.gguf import open_gguf
from sash.spec.gguf_model import spec_from_gguf
from sash.spec.model import Activation, BlockKind, ModelSpec, NormKind, QkNorm, RopeKind
from sash.spec.span import Span

FULL, LOCAL = Span.full(), Span.sliding(8)
EMBED = {"token_embd.weight": np.zeros((8, 32), np.float32)}


def spec_of(tmp_path: Path, arch: str, keys: dict[str, Any] | None = None, **files: Any) -> ModelSpec:
    return spec_from_gguf(open_gguf(write_gguf(tmp_path / "m.gguf", arch, keys, **files)))


def spans(spec: ModelSpec) -> str:
    return "".join("L" if layer.span.bounded else "F" for layer in spec.layers)


@pytest.mark.real
def test_gemma3_270m() -> None:
    spec = spec_from_gguf(open_gguf(real_model("gemma3-270m")))
    assert (spec.architecture, spec.vocab_size, spec.hidden_size, spec.max_position) == ("gemma3", 262144, 640, 32768)
    assert (spec.norm, spec.block, spec.tied_embeddings) == (NormKind.RMS, BlockKind.SANDWICH, True)
    assert spec.embed_scale == math.sqrt(640)
    assert spec.norm_eps == pytest.approx(1e-6)
    assert (spec.bos_token_id, spec.stop_token_ids) == (2, (1, 106))
    assert [i for i, layer in enumerate(spec.layers) if layer.span == FULL] == [5, 11, 17]
    for layer in spec.layers:
        assert layer.span in (FULL, Span.sliding(512))
        assert (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim) == (4, 1, 256, 256)
        assert (layer.scale, layer.softcap, layer.qk_norm) == (1 / 16, 0.0, QkNorm.HEAD)
        assert layer.rope is not None
        assert layer.rope.base == (1e6 if layer.span == FULL else 1e4)
        assert (layer.rope.rotary_dim, layer.rope.kind, layer.rope.interleaved) == (256, RopeKind.DEFAULT, False)
        assert (layer.mlp.intermediate_size, layer.mlp.activation) == (2048, Activation.GELU_TANH)
        assert "gemma3 architecture default: every 6th layer full" in layer.span_source
    assert "gemma3.attention.sliding_window" in spec.layers[0].span_source


@pytest.mark.real
def test_smollm2_135m() -> None:
    spec = spec_from_gguf(open_gguf(real_model("smollm2-135m")))
    assert (spec.vocab_size, spec.hidden_size, len(spec.layers), spec.block) == (49152, 576, 30, BlockKind.PRE)
    assert {layer.span for layer in spec.layers} == {FULL}
    assert spec.layers[0].span_source == "no llama.attention.sliding_window"
    assert spec.stop_token_ids == (0, 2)
    assert (spec.layers[0].num_heads, spec.layers[0].num_kv_heads, spec.layers[0].scale) == (9, 3, 0.125)
    assert spec.layers[0].rope is not None and spec.layers[0].rope.base == 100000.0
    assert (spec.embed_scale, spec.tied_embeddings, spec.qkv_bias) == (1.0, True, False)


@pytest.mark.parametrize(
    ("arch", "pattern", "want", "source"),
    [
        ("gemma3", None, "LLLLLF", "gemma3 architecture default: every 6th layer full"),
        ("gemma2", None, "LFLFLF", "gemma2 architecture default: every 2nd layer full"),
        ("gemma3", 3, "LLFLLF", "gemma3.attention.sliding_window_pattern = 3"),
        ("gemma3", 0, "LLLLLL", "gemma3.attention.sliding_window_pattern = 0"),
        ("gemma3", 1, "FFFFFF", "gemma3.attention.sliding_window_pattern = 1"),
        ("gemma3", [True, False, True, True, False, False], "LFLLFF", "gemma3.attention.sliding_window_pattern"),
        ("qwen3", [True, True, False, True, True, False], "LLFLLF", "qwen3.attention.sliding_window_pattern"),
        ("llama", None, "LLLLLL", "llama.attention.sliding_window"),
        ("phi3", None, "LLLLLL", "phi3.attention.sliding_window"),
    ],
)
def test_which_layers_have_the_window(tmp_path: Path, arch: str, pattern: Any, want: str, source: str) -> None:
    keys = {"attention.sliding_window": 8, "attention.sliding_window_pattern": pattern}
    spec = spec_of(tmp_path, arch, keys)
    assert spans(spec) == want
    assert {layer.span for layer in spec.layers} <= {FULL, LOCAL}
    assert all(source in layer.span_source for layer in spec.layers)


@pytest.mark.parametrize("window", [None, 0])
def test_without_a_window_every_layer_is_full(tmp_path: Path, window: int | None) -> None:
    spec = spec_of(tmp_path, "gemma3", {"attention.sliding_window": window})
    assert spans(spec) == "FFFFFF"
    assert spec.layers[0].span_source == "no gemma3.attention.sliding_window"
    assert spec.notes == ("no gemma3.attention.sliding_window in the file: every layer is full",)
    assert {layer.rope.base for layer in spec.layers if layer.rope} == {1e6}


def test_gemma2_has_a_default_window_and_soft_caps(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "gemma2", {"attention.key_length": 16, "attention.value_length": 16})
    assert spec.layers[0].span == Span.sliding(4096)
    assert "gemma2 architecture default: 4096" in spec.layers[0].span_source
    assert (spec.layers[0].softcap, spec.final_softcap, spec.layers[0].scale) == (50.0, 30.0, 0.25)
    own = spec_of(tmp_path, "gemma2", {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0})
    assert (own.layers[0].softcap, own.final_softcap) == (20.0, 10.0)


@pytest.mark.parametrize(("arch", "layers"), [("gemma3", 62), ("gemma2", 46)])
def test_the_27b_scale_comes_from_the_width(tmp_path: Path, arch: str, layers: int) -> None:
    keys = {"attention.key_length": 16, "attention.head_count": 2, "attention.head_count_kv": 1}
    assert spec_of(tmp_path, arch, keys | {"block_count": layers}).layers[0].scale == (32 / 2) ** -0.5
    keys |= {"attention.key_length": 4}
    assert spec_of(tmp_path, arch, keys | {"block_count": layers}).layers[0].scale == (32 / 2) ** -0.5
    assert spec_of(tmp_path, arch, keys | {"block_count": layers - 1}).layers[0].scale == 0.5


def test_gemma3_scales_rope_on_global_layers_only(tmp_path: Path) -> None:
    keys = {
        "attention.sliding_window": 8, "rope.freq_base": 5e5, "rope.freq_base_swa": 2e4,
        "rope.scaling.type": "linear", "rope.scaling.factor": 8.0,
    }  # fmt: skip
    local, glob = (spec_of(tmp_path, "gemma3", keys).layers[i].rope for i in (0, 5))
    assert local is not None and glob is not None
    assert (local.kind, local.base, local.factor) == (RopeKind.DEFAULT, 2e4, 1.0)
    assert (glob.kind, glob.base, glob.factor) == (RopeKind.LINEAR, 5e5, 8.0)


def test_yarn_and_tables_of_factors(tmp_path: Path) -> None:
    keys = {
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16,
        "rope.dimension_count": 8,
    }  # fmt: skip
    rope = spec_of(tmp_path, "qwen2", keys).layers[0].rope
    assert rope is not None
    assert (rope.kind, rope.factor, rope.original_max_position, rope.attention_factor) == (RopeKind.YARN, 4.0, 16, None)

    table = np.array([1, 2, 4, 8], np.float32)
    rope = spec_of(tmp_path, "llama", tensors=EMBED | {"rope_freqs.weight": table}).layers[0].rope
    assert rope is not None
    assert (rope.kind, rope.short_factor, rope.long_factor) == (RopeKind.LONGROPE, (1, 2, 4, 8), (1, 2, 4, 8))
    assert rope.attention_factor == 1.0

    both = {"rope_factors_short.weight": table, "rope_factors_long.weight": table * 2}
    keys = {"rope.scaling.original_context_length": 16, "rope.scaling.type": "longrope"}
    rope = spec_of(tmp_path, "phi3", keys, tensors=EMBED | both).layers[0].rope
    assert rope is not None
    assert (rope.short_factor, rope.long_factor) == ((1, 2, 4, 8), (2, 4, 8, 16))
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(16)))


def test_llama_experts_biases_and_head(tmp_path: Path) -> None:
    zero = np.zeros(4, np.float32)
    tensors = EMBED | {"blk.0.attn_q.bias": zero, "blk.0.attn_output.bias": zero, "output.weight": zero}
    spec = spec_of(tmp_path, "llama", {"expert_count": 4, "expert_used_count": 2}, tensors=tensors)
    assert (spec.layers[0].mlp.num_experts, spec.layers[0].mlp.experts_per_token) == (4, 2)
    assert (spec.qkv_bias, spec.o_bias, spec.tied_embeddings) == (True, True, False)


def test_heads_may_differ_per_layer(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "llama", {"attention.head_count_kv": [1, 2, 4, 1, 2, 4]})
    assert [layer.num_kv_heads for layer in spec.layers] == [1, 2, 4, 1, 2, 4]
    assert [layer.num_kv_heads for layer in spec_of(tmp_path, "llama", {"attention.head_count_kv": None}).layers] == [
        4
    ] * 6


def test_end_tokens_count_only_where_they_are_control_tokens(tmp_path: Path) -> None:
    words = ["a", "</s>", "<end_of_turn>", "<|im_end|>", "b"]
    keys = {
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": np.array([1, 4, 3, 3, 1], np.int32),
        "tokenizer.ggml.eos_token_id": 4,
        "tokenizer.ggml.bos_token_id": 0,
    }
    spec = spec_of(tmp_path, "gemma3", keys)
    assert (spec.stop_token_ids, spec.bos_token_id) == ((2, 3, 4), 0)


@pytest.mark.parametrize(
    ("arch", "keys", "why"),
    [
        ("mamba", {}, "general.architecture is 'mamba'; GGUF files of llama, gemma2, gemma3, qwen2, qwen3, phi3"),
        ("qwen2", {"attention.sliding_window": 8}, "qwen2.attention.sliding_window is 8, but"),
        ("gemma3", {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True]}, "has 1"),
        ("gemma3", {"attention.sliding_window": 8, "attention.sliding_window_pattern": "LF"}, "is 'LF'"),
        ("gemma3", {"attention.sliding_window": 1.5}, "gemma3.attention.sliding_window must be a whole number"),
        ("llama", {"attention.chunk_size": 8}, "llama.attention.chunk_size describes a window"),
        ("gemma3", {"attention.sliding_window_size": 8}, "gemma3.attention.sliding_window_size describes a window"),
        ("llama", {"block_count": None}, "llama.block_count must be a whole number of 1 or more, is missing"),
        ("llama", {"context_length": 0}, "llama.context_length must be a whole number of 1 or more, is 0"),
        ("llama", {"attention.head_count_kv": 3}, "llama.attention.head_count_kv must divide"),
        ("llama", {"attention.head_count_kv": [1, 2]}, "one for each of 6 layers"),
        ("llama", {"rope.scaling.type": "fancy"}, "llama.rope.scaling.type is 'fancy'"),
        ("llama", {"attention.head_count_kv": [4, 2, 4, 4, 3, 4]}, "must divide the number of heads 4, is 3"),
        ("llama", {"attention.key_length": "wide"}, "llama.attention.key_length must be a whole number of 1 or more"),
        ("llama", {"expert_count": "many"}, "llama.expert_count must be a whole number of 0 or more"),
        ("llama", {"rope.dimension_count": 0}, "llama.rope.dimension_count must be a whole number of 1 or more"),
        ("llama", {"rope.freq_base": "big"}, "llama.rope.freq_base must be a number"),
        ("llama", {"split.count": 2}, "one part of split.count = 2; join the parts"),
    ],
)
def test_what_cannot_be_run_is_refused_and_named(tmp_path: Path, arch: str, keys: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError) as caught:
        spec_of(tmp_path, arch, keys)
    assert why in str(caught.value)


def test_a_window_as_long_as_the_context_needs_no_pattern(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "qwen2", {"attention.sliding_window": 64})
    assert spans(spec) == "FFFFFF"
    assert spec.layers[0].span_source == "qwen2.attention.sliding_window >= qwen2.context_length"


def test_a_file_without_an_embedding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"token_embd\.weight"):
        spec_of(tmp_path, "llama", tensors={"x": np.zeros(4, np.float32)})
