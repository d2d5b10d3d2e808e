"""Hugging Face ``config.json`` to ModelSpec. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sash.spec.errors import ModelError
from sash.spec.hf_families import FAMILIES, Family
from sash.spec.hf_fields import Fields
from sash.spec.hf_rope import rope_of
from sash.spec.hf_windows import FULL, LayerWindow, layer_windows, window_fields_of
from sash.spec.model import MAX_LAYERS, Activation, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from sash.spec.span import SpanKind

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
}


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Translate a parsed config.json.

    Args:
        config: the dictionary, in the transformers-5 form or an older one; a text model nested
            under ``text_config`` is found.

    Raises:
        ModelError: the architecture, a window, a rotary embedding or another field that this
            version can't honour, or fields that contradict each other; the message names the field.
    """
    family = _family(config)
    merged, notes = _text_config(config)
    if quantized := quantization_of(config):
        notes = (*notes, f"{quantized}; this description is read all the same")
    fields = Fields(merged, family.defaults, family.name)
    _refuse(fields)
    num_layers = fields.integer("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise fields.error("num_hidden_layers", num_layers, f"1 to {MAX_LAYERS}")
    windows = layer_windows(fields, num_layers, family.full_every)
    return ModelSpec(
        architecture=family.name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layers=_layers(family, fields, windows),
        max_position=fields.integer("max_position_embeddings"),
        norm=family.norm,
        norm_eps=fields.number(family.norm_eps_field, above=0),
        block=family.block,
        qkv_bias=_switch(fields, family.qkv_bias),
        o_bias=_switch(fields, family.o_bias),
        embed_scale=fields.integer("hidden_size") ** 0.5 if family.scaled_embedding else 1.0,
        logit_scale=fields.number(family.logit_scale_field) if family.logit_scale_field else 1.0,
        final_softcap=_softcap(fields, "final_logit_softcapping"),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        stop_token_ids=fields.token_ids("eos_token_id"),
        notes=notes,
    )


def quantization_of(config: Mapping[str, Any]) -> str:
    """Why the weights beside a parsed config.json can't be read, and what can be; empty where it says nothing of it."""
    text = config.get("text_config")
    quantization = config.get("quantization_config")
    if quantization is None and isinstance(text, Mapping):
        quantization = text.get("quantization_config")
    if quantization is None:
        return ""
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    return (
        f"quantization_config says {method!r}: sash reads unquantised safetensors; to generate, use a copy of the "
        "model in bf16, fp16 or fp32, or a GGUF file"
    )


def supported() -> str:
    """Architectures that can be read, for messages."""
    return ", ".join(name for family in FAMILIES for name in family.architectures)


def _family(config: Mapping[str, Any]) -> Family:
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise ModelError(
            f"architectures in config.json must be a list of names such as LlamaForCausalLM, got {names!r}"
        )
    model_type = config.get("model_type")
    for family in FAMILIES:
        if any(name in family.architectures for name in names) or (not names and model_type in family.model_types):
            return family
    name = ", ".join(map(str, names)) or f"model_type {model_type!r}"
    text = config.get("text_config")
    windows = window_fields_of(config) + (window_fields_of(text) if isinstance(text, Mapping) else [])
    window = (
        f" It has a window ({', '.join(windows)}), so it can't be run as a full-attention model." if windows else ""
    )
    raise ModelError(f"architecture {name} is not supported.{window} Supported: {supported()}")


def _text_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The text model's own dictionary, and what there is to say about the rest."""
    text = config.get("text_config")
    if text is None:
        return dict(config), ()
    if not isinstance(text, Mapping):
        raise ModelError(f"text_config in config.json must be a dictionary, got {text!r}")
    outer = {
        name: config[name]
        for name in ("tie_word_embeddings", "bos_token_id", "eos_token_id")
        if config.get(name) is not None
    }
    return outer | dict(text), ("images are not read: the text model of a multimodal model",)


def _refuse(fields: Fields) -> None:
    """Fields that would change the result and that this version doesn't have."""
    if fields.get("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention is true: sash runs causal models; it must be false or absent")
    for name, only in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if fields.get(name) not in (None, only):
            raise ModelError(f"{name}={fields.get(name)!r} is not supported; it must be {only}")


def _layers(family: Family, fields: Fields, windows: tuple[LayerWindow, ...]) -> tuple[LayerSpec, ...]:
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(f"num_key_value_heads={kv_heads} must divide num_attention_heads={heads}")
    head_dim = _head_dim(family, fields, heads)
    scalar = (
        fields.number("query_pre_attn_scalar", float(head_dim), above=0) if family.scaled_embedding else float(head_dim)
    )
    hybrid = any(window.span.kind is not SpanKind.FULL for window in windows)
    ropes: dict[str, RopeSpec | None] = {}
    for kind in {window.layer_type for window in windows}:
        nope = family.nope_full and hybrid and kind == FULL
        ropes[kind] = None if nope else rope_of(fields, family, kind, head_dim)
    mlp = _mlp(family, fields)
    return tuple(
        LayerSpec(
            span=window.span,
            span_source=window.source,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=head_dim,
            scale=scalar**-0.5,
            rope=ropes[window.layer_type],
            mlp=mlp,
            softcap=_softcap(fields, "attn_logit_softcapping"),
            learned_sinks=family.learned_sinks,
            qk_norm=family.qk_norm,
        )
        for window in windows
    )


def _head_dim(family: Family, fields: Fields, heads: int) -> int:
    if family.own_head_dim and fields.get("head_dim") is not None:
        return fields.integer("head_dim")
    hidden = fields.integer("hidden_size")
    if hidden % heads:
        raise ModelError(
            f"hidden_size={hidden} must be a multiple of num_attention_heads={heads}, or head_dim be given"
        )
    return hidden // heads


def _mlp(family: Family, fields: Fields) -> MlpSpec:
    size, bias = fields.integer("intermediate_size"), _switch(fields, family.mlp_bias)
    activation = family.activation or _activation(family, fields)
    if not family.experts:
        return MlpSpec(size, activation, bias)
    experts, chosen = fields.integer("num_local_experts"), fields.integer("num_experts_per_tok")
    if chosen > experts:
        raise ModelError(f"num_experts_per_tok={chosen} must be at most num_local_experts={experts}")
    return MlpSpec(size, activation, bias, num_experts=experts, experts_per_token=chosen, router_bias=bias)


def _activation(family: Family, fields: Fields) -> Activation:
    name = fields.text(family.activation_field)
    if name not in ACTIVATIONS:
        raise ModelError(f"{family.activation_field}={name!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _switch(fields: Fields, value: bool | str) -> bool:
    return fields.flag(value) if isinstance(value, str) else value


def _softcap(fields: Fields, name: str) -> float:
    """A soft cap, 0 for none; an explicit null means none whatever the default is."""
    value = fields.get(name)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1e30:
        raise fields.error(name, value, "a finite number above 0, or null for none")
    return float(value)
