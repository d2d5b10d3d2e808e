"""Values that no model has are refused by the name of the field or key, at once and in little memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.gguf_files import write_gguf

from sash.spec.errors import ModelError
from sash.spec.gguf import open_gguf
from sash.spec.gguf_model import spec_from_gguf
from sash.spec.hf import spec_from_hf

GEMMA: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", 5),
        ("architectures", "Gemma2ForCausalLM"),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 10**30),
        ("rms_norm_eps", -1e-6),
        ("rms_norm_eps", 10**400),
        ("query_pre_attn_scalar", 0),
        ("query_pre_attn_scalar", -4),
        ("attn_logit_softcapping", math.nan),
        ("final_logit_softcapping", math.inf),
    ],
)
def test_a_field_of_a_config(field: str, value: object) -> None:
    with pytest.raises(ModelError, match=rf"^{field} in config\.json must be "):
        spec_from_hf(GEMMA | {field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_type", ["yarn"]),
        ("rope_type", {"a": 1}),
        ("original_max_position_embeddings", math.nan),
        ("original_max_position_embeddings", math.inf),
        ("original_max_position_embeddings", 1),
        ("beta_fast", 0),
        ("beta_slow", -1.0),
    ],
)
def test_a_field_of_a_rope(field: str, value: object) -> None:
    with pytest.raises(ModelError, match=rf"{field} .*must be "):
        spec_from_hf(GEMMA | {"rope_scaling": YARN | {field: value}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 2**32 - 1),
        ("attention.layer_norm_rms_epsilon", -1.0),
        ("rope.freq_base", -1.0),
        ("rope.freq_base", 0.0),
        ("rope.dimension_count", 2**31),
        ("rope.dimension_count", 3),
        ("rope.scaling.factor", -2.0),
        ("attn_logit_softcapping", -1.0),
        ("final_logit_softcapping", math.inf),
        ("general.architecture", ["llama"]),
        ("split.count", "two"),
        ("tokenizer.ggml.tokens", 7),
        ("tokenizer.ggml.tokens", [1, 2]),
        ("tokenizer.ggml.scores", True),
        ("tokenizer.ggml.token_type", ["a"]),
        ("tokenizer.ggml.token_type", 1.5),
        ("tokenizer.ggml.bos_token_id", "one"),
        ("tokenizer.ggml.unknown_token_id", np.array([1], np.int32)),
        ("tokenizer.chat_template", 5),
    ],
)
def test_a_key_of_a_gguf_file(key: str, value: object, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", {key: value})
    with pytest.raises(ModelError, match=rf"{key} .*must "):
        spec_from_gguf(open_gguf(path))


@pytest.mark.parametrize("name", ["factor", "yarn_beta_fast", "yarn_beta_slow"])
def test_a_number_of_yarn(name: str, tmp_path: Path) -> None:
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, f"rope.scaling.{name}": -1.0}
    with pytest.raises(ModelError, match=rf"rope\.scaling\.{name} must be a number of "):
        spec_from_gguf(open_gguf(write_gguf(tmp_path / "m.gguf", "llama", keys)))


def test_a_yarn_that_stretches_nothing(tmp_path: Path) -> None:
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 1e9}
    with pytest.raises(ModelError, match=r"rope\.scaling\.factor must be below the context"):
        spec_from_gguf(open_gguf(write_gguf(tmp_path / "m.gguf", "llama", keys)))
