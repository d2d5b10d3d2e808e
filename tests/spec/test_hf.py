"""config.json to ModelSpec: what is detected, from which field, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sash.spec.errors import ModelError
from sash.spec.hf import spec_from_hf
from sash.spec.hf_windows import WINDOW_FIELDS
from sash.spec.model import Activation, BlockKind, ModelSpec, NormKind, QkNorm, RopeKind

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
}
QWEN = {"sliding_window": 7, "max_window_layers": 4}
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def config(family: str = "llama", **values: Any) -> dict[str, Any]:
    """A small config with nothing but sizes; ``values`` are added, and taken out where they are ``...``."""
    base = {
        "architectures": [ARCHITECTURES[family]],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    return {name: value for name, value in (base | values).items() if value is not ...}


def windows(spec: ModelSpec) -> str:
    """One letter a layer: F full, W window, C chunk."""
    return "".join({"full": "F", "sliding": "W", "chunked": "C"}[layer.span.kind] for layer in spec.layers)


def sources(spec: ModelSpec) -> set[str]:
    return {layer.span_source for layer in spec.layers}


def widths(spec: ModelSpec) -> list[int]:
    return [layer.span.window for layer in spec.layers]


@pytest.mark.parametrize(
    ("family", "wanted", "width"),
    [
        ("llama", "FFFFFF", 0),
        ("mistral", "WWWWWW", 4096),
        ("mixtral", "FFFFFF", 0),
        ("qwen2", "FFFFFF", 0),
        ("qwen3", "FFFFFF", 0),
        ("gemma2", "WFWFWF", 4096),
        ("gemma3", "WWWWWF", 4096),
        ("phi3", "FFFFFF", 0),
        ("cohere2", "WWWFWW", 4096),
        ("olmo3", "WWWFWW", 4096),
        ("exaone4", "WWWFWW", 4096),
        ("gpt-oss", "WFWFWF", 128),
    ],
)
def test_a_silent_config_means_its_architectures_defaults(family: str, wanted: str, width: int) -> None:
    spec = spec_from_hf(config(family))
    assert windows(spec) == wanted
    assert max(widths(spec)) == width
    assert spec.architecture == family


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_the_same_defaults_as_transformers(family: str) -> None:
    """Every field that changes a result, on a config with nothing but sizes."""
    transformers = pytest.importorskip("transformers")
    values = config(family)
    names = [name for name in dir(transformers) if name.endswith("Config")]
    model_type = {"gemma3": "gemma3_text", "gpt-oss": "gpt_oss"}.get(family, family)
    class_name = next(n for n in names if getattr(getattr(transformers, n), "model_type", None) == model_type)
    theirs = getattr(transformers, class_name)(**{k: v for k, v in values.items() if k != "architectures"})
    ours = spec_from_hf(values)
    again = spec_from_hf(theirs.to_dict() | {"architectures": values["architectures"]})
    assert ours.layers[0].rope == again.layers[0].rope
    assert [layer.rope for layer in ours.layers] == [layer.rope for layer in again.layers]
    assert widths(ours) == widths(again)
    for name in ("max_position", "norm_eps", "qkv_bias", "o_bias", "embed_scale", "logit_scale", "final_softcap"):
        assert getattr(ours, name) == getattr(again, name), name
    assert ours.tied_embeddings == again.tied_embeddings
    assert ours.stop_token_ids == again.stop_token_ids
    assert [layer.mlp for layer in ours.layers] == [layer.mlp for layer in again.layers]
    assert [(x.scale, x.softcap, x.num_kv_heads) for x in ours.layers] == [
        (x.scale, x.softcap, x.num_kv_heads) for x in again.layers
    ]


# ------------------------------------------------------------------------------ every field that can carry a window


@pytest.mark.parametrize(
    ("family", "values", "wanted", "source"),
    [
        ("mistral", {"sliding_window": 7}, "WWWWWW", "sliding_window"),
        ("mistral", {"sliding_window": None}, "FFFFFF", "sliding_window"),
        ("mistral", {"sliding_window_size": 7}, "WWWWWW", "sliding_window_size"),
        ("mistral", {"sliding_window": None, "window_size": 7}, "WWWWWW", "window_size"),
        ("llama", {"sliding_window_size": 7}, "WWWWWW", "sliding_window_size"),
        ("llama", {"window_size": 7}, "WWWWWW", "window_size"),
        ("llama", {"attention_window": 7}, "WWWWWW", "attention_window"),
        ("llama", {"sliding_window": 7, "layer_types": [SLIDING, FULL] * 3}, "WFWFWF", "layer_types"),
        ("llama", {"attention_chunk_size": 8, "layer_types": [CHUNKED, FULL] * 3}, "CFCFCF", "layer_types"),
        ("llama", {"sliding_window": 7, "swa_layers": [True, False] * 3}, "WFWFWF", "swa_layers"),
        ("llama", {"sliding_window": 7, "swa_layers": [1, 0] * 3}, "WFWFWF", "swa_layers"),
        ("llama", {"sliding_window": 7, "swa_attention_layer_ids": [1, 4]}, "FWFFWF", "swa_attention_layer_ids"),
        ("llama", {"sliding_window": 7, "full_attention_layer_ids": [1, 4]}, "WFWWFW", "full_attention_layer_ids"),
        ("gemma3", {"sliding_window": 7, "sliding_window_pattern": 2}, "WFWFWF", "sliding_window_pattern"),
        ("exaone4", {"sliding_window": 7, "sliding_window_pattern": "LLG"}, "WWFWWF", "sliding_window_pattern"),
        ("exaone4", {"sliding_window": 7, "sliding_window_pattern": "LLLG"}, "WWWFWF", "sliding_window_pattern"),
        ("exaone4", {"sliding_window": None, "sliding_window_pattern": None}, "FFFFFF", "sliding_window"),
        ("qwen2", QWEN | {"use_sliding_window": True}, "FFFFWW", "max_window_layers"),
        ("qwen2", QWEN | {"use_sliding_window": False}, "FFFFFF", "use_sliding_window"),
        ("qwen2", {"sliding_window": 7}, "FFFFFF", "use_sliding_window (default of qwen2)"),
        ("gemma2", {"layer_types": [FULL] * 6, "sliding_window": None}, "FFFFFF", "layer_types"),
        ("llama", {}, "FFFFFF", "no window field"),
    ],
)  # fmt: skip
def test_a_window_is_found_and_its_field_named(family: str, values: dict[str, Any], wanted: str, source: str) -> None:
    spec = spec_from_hf(config(family, **values))
    assert windows(spec) == wanted
    assert sources(spec) == {source}
    assert {w for w in widths(spec) if w} <= {7, 8}


def test_lists_of_windows_give_each_layer_its_own() -> None:
    spec = spec_from_hf(config(attention_window=[4, 8, None, 4, 8, None]))
    assert widths(spec) == [4, 8, 0, 4, 8, 0]
    assert spec.layers[1].span_source == "attention_window[1]"
    spec = spec_from_hf(config(sliding_window=None, swa_layers=[0, 16, 0, 32, 0, 0]))
    assert widths(spec) == [0, 16, 0, 32, 0, 0]
    assert spec.layers[3].span_source == "swa_layers[3]"


def test_window_layers_can_have_a_rope_base_of_their_own() -> None:
    values = {"sliding_window": 7, "swa_attention_layer_ids": [0], "swa_rotary_base": 5000.0, "rope_theta": 1e6}
    spec = spec_from_hf(config(**values))
    assert [layer.rope.base for layer in spec.layers if layer.rope] == [5000.0, *[1e6] * 5]


# ---------------------------------------------------------------------------------------------------- refused, named


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"reference_window": 128}, ["reference_window=128"]),
        ({"rswa_window": 128}, ["rswa_window=128"]),
        ({"use_reference_attention": True}, ["use_reference_attention=True"]),
        ({"sliding_window": 0}, ["sliding_window", "1 or more", "got 0"]),
        ({"sliding_window": -1}, ["sliding_window", "got -1"]),
        ({"sliding_window": "wide"}, ["sliding_window", "'wide'"]),
        ({"sliding_window": True}, ["sliding_window", "True"]),
        ({"window_size": 0}, ["window_size", "got 0"]),
        ({"sliding_window": 8, "sliding_window_size": 9}, ["sliding_window=8", "sliding_window_size=9"]),
        ({"attention_window": [4, 4]}, ["attention_window", "6 layers", "2 entries"]),
        ({"attention_window": [4, 4, 4, 0, 4, 4]}, ["attention_window[3]", "got 0"]),
        ({"layer_types": [FULL] * 5}, ["layer_types", "6 layers", "5 entries"]),
        ({"layer_types": "full"}, ["layer_types", "'full'"]),
        ({"layer_types": [FULL] * 5 + ["linear_attention"]}, ["layer_types[5]", "linear_attention"]),
        ({"layer_types": [SLIDING] * 6}, ["layer_types", "set sliding_window"]),
        ({"layer_types": [SLIDING] * 6, "use_sliding_window": False}, ["layer_types", "use_sliding_window is false"]),
        ({"attention_window": [4] * 6, "use_sliding_window": False}, ["attention_window names", "is false"]),
        ({"layer_types": [CHUNKED] * 6}, ["attention_chunk_size"]),
        ({"layer_types": [CHUNKED] * 6, "attention_chunk_size": 0}, ["attention_chunk_size", "got 0"]),
        ({"attention_chunk_size": 8}, ["attention_chunk_size needs layer_types"]),
        ({"use_sliding_window": True, "sliding_window": None}, ["use_sliding_window is true", "window is null"]),
        ({"swa_layers": [0, 1]}, ["swa_layers", "6 layers"]),
        ({"swa_layers": [True] * 6}, ["swa_layers[0]", "set sliding_window"]),
        ({"swa_layers": [0, -4, 0, 0, 0, 0]}, ["swa_layers[1]", "got -4"]),
        ({"swa_attention_layer_ids": [1]}, ["swa_attention_layer_ids", "set sliding_window"]),
        ({"sliding_window": 4, "swa_attention_layer_ids": [6]}, ["swa_attention_layer_ids", "0 to 5"]),
        ({"sliding_window": 4, "full_attention_layer_ids": 3}, ["full_attention_layer_ids", "got 3"]),
        (
            {"sliding_window": 4, "swa_attention_layer_ids": [0], "full_attention_layer_ids": [0]},
            ["full_attention_layer_ids=[0] contradicts swa_attention_layer_ids"],
        ),
        (
            {"sliding_window": 4, "layer_types": [SLIDING, FULL] * 3, "swa_attention_layer_ids": [1]},
            ["swa_attention_layer_ids=[1] contradicts layer_types"],
        ),
        ({"sliding_window": 4, "sliding_window_pattern": 0}, ["sliding_window_pattern", "got 0"]),
        ({"sliding_window": 4, "sliding_window_pattern": "LX"}, ["sliding_window_pattern", "'LX'"]),
        ({"sliding_window": 4, "max_window_layers": -1}, ["max_window_layers", "got -1"]),
    ],
)  # fmt: skip
def test_a_window_that_cannot_be_honoured_names_its_field(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        spec_from_hf(config(**values))
    for word in words:
        assert word in str(caught.value)


def test_a_hybrid_architecture_whose_window_is_null_is_refused() -> None:
    with pytest.raises(ModelError, match="gemma2 has window layers, but sliding_window is null"):
        spec_from_hf(config("gemma2", sliding_window=None))


def test_an_unknown_architecture_is_refused_with_what_is_supported() -> None:
    with pytest.raises(ModelError, match=r"FalconForCausalLM is not supported\. Supported: LlamaForCausalLM, Mistral"):
        spec_from_hf(config() | {"architectures": ["FalconForCausalLM"]})
    with pytest.raises(ModelError, match="model_type 'falcon' is not supported"):
        spec_from_hf(config(architectures=..., model_type="falcon"))


WINDOW_VALUES = {"swa_layers": [0, 1], "swa_attention_layer_ids": [1], "full_attention_layer_ids": [1]}


@pytest.mark.parametrize("name", WINDOW_FIELDS)
def test_an_unknown_architecture_with_a_window_names_the_field(name: str) -> None:
    values = {name: WINDOW_VALUES.get(name, 128)}
    for foreign in (values, {"text_config": values}):
        with pytest.raises(ModelError, match=rf"ZayaForCausalLM is not supported.*{name}="):
            spec_from_hf({"architectures": ["ZayaForCausalLM"], **foreign})


def test_an_unknown_architecture_with_window_layer_types_names_them() -> None:
    with pytest.raises(ModelError, match=r"layer_types=\['sliding_attention'\]"):
        spec_from_hf({"architectures": ["XForCausalLM"], "layer_types": [FULL, SLIDING]})


@pytest.mark.parametrize(
    ("family", "values", "words"),
    [
        ("llama", {"vocab_size": ...}, ["lacks vocab_size"]),
        ("llama", {"num_hidden_layers": 0}, ["num_hidden_layers", "got 0"]),
        ("llama", {"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ("llama", {"hidden_size": 66, "head_dim": ...}, ["hidden_size=66", "num_attention_heads=4"]),
        ("llama", {"num_key_value_heads": 3}, ["num_key_value_heads=3", "num_attention_heads=4"]),
        ("llama", {"hidden_act": "relu2"}, ["hidden_act='relu2'", "silu"]),
        ("llama", {"attention_bias": 1}, ["attention_bias", "true or false"]),
        ("llama", {"eos_token_id": "end"}, ["eos_token_id", "'end'"]),
        ("llama", {"rms_norm_eps": "small"}, ["rms_norm_eps", "'small'"]),
        ("llama", {"text_config": 3}, ["text_config"]),
        ("gemma3", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ("gemma2", {"final_logit_softcapping": 0}, ["final_logit_softcapping", "null for none"]),
        ("gemma2", {"hidden_activation": "tanh"}, ["hidden_activation='tanh'"]),
        ("gpt-oss", {"swiglu_limit": 5.0}, ["swiglu_limit=5.0", "7.0"]),
        ("mixtral", {"num_experts_per_tok": 9}, ["num_experts_per_tok=9", "num_local_experts=8"]),
        ("llama", {"rope_scaling": {"rope_type": "spiral"}}, ["rope_scaling", "'spiral'", "longrope"]),
        ("llama", {"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, ["rope_scaling"]),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, ["lacks factor"]),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, ["factor", "above 0"]),
        ("llama", {"rope_scaling": "linear"}, ["rope_scaling", "dictionary"]),
        ("llama", {"rope_theta": 0}, ["rope_theta", "above 1"]),
        ("llama", {"partial_rotary_factor": 1.5}, ["partial_rotary_factor=1.5"]),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            ["high_freq_factor", "above low_freq_factor"],
        ),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}},
            ["long_factor", "8 positive numbers", "7 entries"],
        ),
        ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0] * 8}}, ["long_factor", "None"]),
        ("phi3", {"original_max_position_embeddings": "4k", "rope_scaling": {"type": "su"}}, ["original_max_position"]),
    ],
)  # fmt: skip
def test_a_field_that_cannot_work_is_named(family: str, values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        spec_from_hf(config(family, **values))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("nested", [False, True])
def test_quantized_weights_are_a_note_and_change_nothing_else(nested: bool) -> None:
    plain, quantized = config("gpt-oss"), config("gpt-oss", quantization_config={"quant_method": "mxfp4"})
    if nested:
        outer = {"architectures": ["GptOssForCausalLM"]}
        plain, quantized = outer | {"text_config": plain}, outer | {"text_config": quantized}
    spec = spec_from_hf(quantized)
    *before, note = spec.notes
    assert replace(spec, notes=tuple(before)) == spec_from_hf(plain)
    for word in ("quantization_config", "mxfp4", "bf16"):
        assert word in note


# ------------------------------------------------------------------------------------- forms of one and the same thing


def test_rope_in_old_and_new_form_is_the_same() -> None:
    numbers = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    old = spec_from_hf(config(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **numbers}))
    older = spec_from_hf(config(rope_theta=5e5, rope_scaling={"type": "llama3", **numbers}))
    new = spec_from_hf(config(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **numbers}))
    assert old == older == new
    rope = new.layers[0].rope
    assert rope is not None and rope.kind is RopeKind.LLAMA3 and rope.factor == 8.0


def test_gemma3_in_old_and_new_form_is_the_same() -> None:
    old = spec_from_hf(
        config(
            "gemma3",
            sliding_window=512,
            sliding_window_pattern=6,
            rope_theta=1e6,
            rope_local_base_freq=1e4,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        )
    )
    new = spec_from_hf(
        config(
            "gemma3",
            sliding_window=512,
            layer_types=[SLIDING] * 5 + [FULL],
            rope_parameters={
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        )
    )
    assert [layer.rope for layer in old.layers] == [layer.rope for layer in new.layers]
    assert widths(old) == widths(new) == [512] * 5 + [0]
    bases = [layer.rope.base for layer in new.layers if layer.rope]
    assert bases == [1e4] * 5 + [1e6]
    assert new.layers[0].rope is not None and new.layers[0].rope.kind is RopeKind.DEFAULT


def test_a_text_model_inside_a_multimodal_config_is_found() -> None:
    text = config("gemma3", architectures=..., sliding_window=512)
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]}
    spec = spec_from_hf(outer | {"vision_config": {"hidden_size": 3}})
    assert windows(spec) == "WWWWWF"
    assert spec.stop_token_ids == (1, 106)
    assert spec.notes
    assert spec_from_hf(config("gemma3", architectures=..., model_type="gemma3_text")).architecture == "gemma3"


def test_yarn_is_for_full_layers_alone_in_olmo3() -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2}
    spec = spec_from_hf(config("olmo3", rope_scaling=scaling, max_position_embeddings=65536))
    kinds = [layer.rope.kind for layer in spec.layers if layer.rope]
    assert kinds == [RopeKind.DEFAULT] * 3 + [RopeKind.YARN] + [RopeKind.DEFAULT] * 2
    assert spec.layers[3].rope is not None and spec.layers[3].rope.attention_factor == 1.2


def test_no_rope_on_full_layers_of_cohere2_and_of_hybrid_exaone4() -> None:
    for family in ("cohere2", "exaone4"):
        spec = spec_from_hf(config(family))
        assert [layer.rope is None for layer in spec.layers] == [False, False, False, True, False, False]
    spec = spec_from_hf(config("exaone4", sliding_window=None))
    assert all(layer.rope is not None for layer in spec.layers)


def test_what_each_block_is_made_of() -> None:
    gemma, cohere, olmo = (spec_from_hf(config(name)) for name in ("gemma3", "cohere2", "olmo3"))
    assert (gemma.block, gemma.norm) == (BlockKind.SANDWICH, NormKind.RMS_PLUS_ONE)
    assert (cohere.block, cohere.norm) == (BlockKind.PARALLEL, NormKind.LAYER)
    assert (olmo.block, olmo.layers[0].qk_norm) == (BlockKind.POST, QkNorm.FULL)
    oss = spec_from_hf(config("gpt-oss")).layers[0]
    assert oss.learned_sinks and oss.mlp.activation is Activation.CLAMPED_SWIGLU and oss.mlp.router_bias
