"""From canonical weights to those that a decoder multiplies with: joined, then packed by the table of ops."""

from __future__ import annotations

import torch

from sash.ops.base import Ops, Weight
from sash.spec.errors import ModelError
from sash.spec.model import ModelSpec, expected_weights

# Joined linear layers, and the parts they are made of. One product instead of two or three.
JOINED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
LINEARS = ("qkv", "o", "gate_up", "down")

Prepared = dict[str, Weight]
Weights = dict[str, torch.Tensor]


def prepare(spec: ModelSpec, weights: Weights, ops: Ops) -> Prepared:
    """Join q, k, v and gate, up, and pack every linear layer but a router.

    Args:
        spec: the model.
        weights: canonical names (``expected_weights``); emptied on the way, so that no tensor is held twice
            for long.
        ops: the table whose ``pack`` is used.

    Returns:
        The canonical names, with ``qkv``, ``qkv_bias``, ``gate_up`` and ``gate_up_bias`` in place of their
        parts; an expert's linear layers are ``gate_up.{e}`` and ``down.{e}``; ``head`` is always there, and
        ``embed`` is the head itself where the two are tied and the table can look up rows in what it packs.

    Raises:
        ModelError: a weight is missing.
    """
    missing = sorted(expected_weights(spec).keys() - weights.keys())
    if missing:
        raise ModelError(f"weights are missing: {', '.join(missing)}")
    out: Prepared = {"final_norm": weights.pop("final_norm")}
    embed = weights.pop("embed")
    out["head"] = (ops.pack_head or ops.pack)(embed if spec.tied_embeddings else weights.pop("head"))
    out["embed"] = out["head"] if spec.tied_embeddings and ops.looks_up else embed
    del embed
    for i in range(len(spec.layers)):
        out.update(prepare_layer(spec, i, take_layer(weights, i), ops))
    return out


def take_layer(weights: Weights, index: int) -> Weights:
    """One layer's weights without their prefix, taken out of ``weights``."""
    prefix = f"layers.{index}."
    return {name.removeprefix(prefix): weights.pop(name) for name in list(weights) if name.startswith(prefix)}


def prepare_layer(spec: ModelSpec, index: int, own: Weights, ops: Ops) -> Prepared:
    """One layer's canonical weights without their prefix, joined, packed and named in full; ``own`` is emptied."""
    experts = spec.layers[index].mlp.num_experts
    prefix = f"layers.{index}."
    for joined, parts in JOINED.items():
        dim = 1 if experts and joined == "gate_up" else 0
        own[joined] = torch.cat([own.pop(part) for part in parts], dim=dim)
        if f"{parts[0]}_bias" in own:
            own[f"{joined}_bias"] = torch.cat([own.pop(f"{part}_bias") for part in parts], dim=dim)
    out: Prepared = {}
    for name in list(own):
        tensor = own.pop(name)
        if name not in LINEARS:
            out[prefix + name] = tensor
        elif tensor.dim() == 3:
            out.update({f"{prefix}{name}.{e}": ops.pack(one) for e, one in enumerate(tensor)})
        else:
            out[prefix + name] = ops.pack(tensor)
    return out
