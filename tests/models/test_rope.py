"""Rotary angles against transformers, and the frequency sets that an engine fixes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from sash.models.rope import Rope, inverse_frequencies
from sash.spec.errors import ModelError
from sash.spec.hf import spec_from_hf
from sash.spec.model import RopeKind, RopeSpec

SIZES = {
    "vocab_size": 100,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SHORT, LONG = [1.0 + i / 40 for i in range(32)], [1.0 + i / 4 for i in range(32)]
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 4096},
    "yarn exact": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 1024,
    },
    "yarn mscale": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 4096,
    },
    "yarn factor": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "attention_factor": 1.3,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "original_max_position_embeddings": 4096,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def rope_of(config: dict[str, Any], max_model_len: int, architecture: str = "LlamaForCausalLM") -> Rope:
    spec = spec_from_hf({"architectures": [architecture], **SIZES, **config}).layers[0].rope
    assert spec is not None
    return Rope(spec, max_model_len, torch.device("cpu"))


@pytest.mark.parametrize("name", ROPES)
def test_angles_agree_with_transformers_far_into_a_text(name: str) -> None:
    config = {"rope_parameters": ROPES[name], "max_position_embeddings": 32768}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**SIZES, **config))
    positions = torch.tensor([0, 1, 17, 4095, 4096, 30000, 32767])
    cos, sin = theirs(torch.zeros(1), positions[None])
    own_cos, own_sin = rope_of(config, 32768).cos_sin(positions)
    torch.testing.assert_close(own_cos, cos[0, :, :32], rtol=0, atol=1e-6)
    torch.testing.assert_close(own_sin, sin[0, :, :32], rtol=0, atol=1e-6)


@pytest.mark.parametrize("length", [64, 65])
def test_longrope_takes_its_set_from_max_model_len(length: int) -> None:
    config = {
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT, "long_factor": LONG},
        "original_max_position_embeddings": 64,
        "max_position_embeddings": 512,
    }
    theirs = Phi3RotaryEmbedding(Phi3Config(**SIZES, pad_token_id=0, **config))
    positions = torch.arange(length)
    cos, _ = theirs(torch.zeros(1), positions[None])
    own, _ = rope_of(config, length, "Phi3ForCausalLM").cos_sin(positions)
    torch.testing.assert_close(own, cos[0, :, :32], rtol=0, atol=1e-6)
    # The engine's setting decides, not the text at hand: a short text under a long setting takes the long set.
    under_long, _ = rope_of(config, 512, "Phi3ForCausalLM").cos_sin(positions[:10])
    assert torch.equal(own[:10], under_long) == (length > 64)


def test_dynamic_takes_its_base_from_max_model_len() -> None:
    config = {"rope_parameters": ROPES["dynamic"], "max_position_embeddings": 100}
    within, grown = rope_of(config, 50).inv_freq, rope_of(config, 300).inv_freq
    assert torch.equal(within, rope_of(config, 100).inv_freq)
    assert (grown[1:] < within[1:]).all()
    theirs = LlamaRotaryEmbedding(LlamaConfig(**SIZES, **config))
    theirs(torch.zeros(1), torch.arange(300)[None])
    torch.testing.assert_close(grown, theirs.inv_freq, rtol=1e-6, atol=0)


def test_longrope_without_enough_factors_is_refused() -> None:
    spec = RopeSpec(64, kind=RopeKind.LONGROPE, short_factor=(1.0,), long_factor=(1.0,) * 32, original_max_position=64)
    with pytest.raises(ModelError, match="need 32 numbers each, got 1"):
        inverse_frequencies(spec, 64)
    assert inverse_frequencies(spec, 65).shape == (32,)
