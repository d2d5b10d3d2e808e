"""Tensor names of Hugging Face checkpoints, translated to the canonical names of ``expected_weights``.

One table serves all families: what a norm is called follows from where the block has it, and a
fused or interleaved tensor is known by its name and the layer's MLP kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sash.spec.model import Activation, BlockKind, LayerSpec, ModelSpec

Take = Callable[[torch.Tensor], torch.Tensor]

PREFIXES = ("model.language_model.", "language_model.model.", "model.")
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
# Buffers that older files carry and that are computed here, and the towers of multimodal models.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
IGNORED_PREFIXES = tuple(p + t for p in ("", "model.") for t in ("vision_tower.", "multi_modal_projector."))

LAYER_NAME = re.compile(r"layers\.(\d+)\.(.+)")
EXPERT_NAME = re.compile(r"block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")
EXPERT_PARTS = {"w1": "gate", "w2": "down", "w3": "up"}
GLOBALS = {"embed_tokens.weight": "embed", "norm.weight": "final_norm"}
PARTS = {
    **{f"self_attn.{x}_proj.weight": x for x in "qkvo"},
    **{f"self_attn.{x}_proj.bias": f"{x}_bias" for x in "qkvo"},
    **{f"self_attn.{x}_norm.weight": f"{x}_norm" for x in "qk"},
    "self_attn.sinks": "sinks",
    **{f"mlp.{x}_proj.weight": x for x in ("gate", "up", "down")},
    **{f"mlp.{x}_proj.bias": f"{x}_bias" for x in ("gate", "up", "down")},
    "mlp.router.weight": "router",
    "mlp.router.bias": "router_bias",
    "mlp.gate.weight": "router",
    "block_sparse_moe.gate.weight": "router",
    "input_layernorm.weight": "attn_norm",
    "pre_feedforward_layernorm.weight": "mlp_norm",
    "post_feedforward_layernorm.weight": "post_mlp_norm",
}


@dataclass(frozen=True, slots=True)
class Target:
    """Where (a part of) a file's tensor goes.

    ``take`` turns the file's tensor into the canonical one, or into one expert's slice of it when
    ``expert`` is given. It only slices, transposes and views, so it also tells the shape of a
    tensor on the meta device.
    """

    name: str
    take: Take
    expert: int | None = None


def targets(name: str, spec: ModelSpec) -> tuple[Target, ...] | None:
    """What a file's tensor stands for: nothing for a known extra, None for an unknown name."""
    if name.endswith(IGNORED_SUFFIXES) or name.startswith(IGNORED_PREFIXES):
        return ()
    if name in HEADS:
        return () if spec.tied_embeddings else (Target("head", _whole),)
    bare = next((name.removeprefix(p) for p in PREFIXES if name.startswith(p)), name)
    if bare in GLOBALS:
        return (Target(GLOBALS[bare], _whole),)
    match = LAYER_NAME.fullmatch(bare)
    if match is None or int(match[1]) >= len(spec.layers):
        return None
    index = int(match[1])
    found = _layer_targets(match[2], spec, spec.layers[index])
    return None if found is None else tuple(Target(f"layers.{index}.{t.name}", t.take, t.expert) for t in found)


def _layer_targets(part: str, spec: ModelSpec, layer: LayerSpec) -> tuple[Target, ...] | None:
    if part == "post_attention_layernorm.weight":
        # Named so by Llama for the norm before the MLP, by the others for the one after attention.
        return (Target("mlp_norm" if spec.block is BlockKind.PRE else "post_attn_norm", _whole),)
    if part in PARTS:
        return (Target(PARTS[part], _whole),)
    match = EXPERT_NAME.fullmatch(part)
    if match is not None:
        return (Target(EXPERT_PARTS[match[2]], _whole, int(match[1])),)
    return _fused_targets(part, layer)


def _fused_targets(part: str, layer: LayerSpec) -> tuple[Target, ...] | None:
    q, k = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    inner = layer.mlp.intermediate_size
    interleaved = layer.mlp.activation is Activation.CLAMPED_SWIGLU
    match part:
        case "self_attn.qkv_proj.weight":
            rows = {"q": slice(0, q), "k": slice(q, q + k), "v": slice(q + k, None)}
            return tuple(Target(name, _rows(s)) for name, s in rows.items())
        case "mlp.gate_up_proj.weight":
            return Target("gate", _rows(slice(0, inner))), Target("up", _rows(slice(inner, None)))
        case "mlp.experts.gate_up_proj" if interleaved:  # [E, in, 2 · I], gate and up alternating
            return Target("gate", lambda t: t[..., ::2].mT), Target("up", lambda t: t[..., 1::2].mT)
        case "mlp.experts.gate_up_proj":  # [E, 2 · I, in]
            return Target("gate", lambda t: t[:, :inner]), Target("up", lambda t: t[:, inner:])
        case "mlp.experts.gate_up_proj_bias":
            return Target("gate_bias", lambda t: t[..., ::2]), Target("up_bias", lambda t: t[..., 1::2])
        case "mlp.experts.down_proj":  # [E, I, out] in gpt-oss, [E, out, I] elsewhere
            return (Target("down", (lambda t: t.mT) if interleaved else _whole),)
        case "mlp.experts.down_proj_bias":
            return (Target("down_bias", _whole),)
        case _:
            return None


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _rows(part: slice) -> Take:
    return lambda tensor: tensor[part]
