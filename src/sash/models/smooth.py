"""Smoothing: weights rescaled so that rounding activations and weights to a few bits costs less.

An input channel of a linear layer times s, and the same channel of its activations over s, is the same layer
(SmoothQuant, arXiv 2211.10438; AWQ, arXiv 2306.00978). Where a few channels of the activations are much louder
than the rest, they set the step to which all of a row is rounded; s takes from them and gives to the weights. The
activations' side costs nothing: a norm's weights, the rows of ``up`` and those of ``v`` take it in.

How loud channels are is measured on random tokens: loud channels are the model's, whatever it reads.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from sash.models.decoder import Attend, Layer
from sash.models.mlp import GatedMlp
from sash.models.prepare import Weights, prepare_layer
from sash.models.rope import Rope
from sash.ops.base import Ops, Weight, as_is, embedding
from sash.spec.model import Activation, BlockKind, LayerSpec, ModelSpec, NormKind, RopeSpec

TOKENS = 256
SEED = 0
# s = (loudness of the activations / loudness of the weights) to this power; 1 would take all from the activations.
EXPONENT = 0.35
# Channels that are quieter than this share of the loudest count as that loud.
FLOOR = 1e-3

# Mean squares of the inputs of a layer's products: [inputs] by the product's name.
Loudness = dict[str, torch.Tensor]


@torch.inference_mode()
def smooth(spec: ModelSpec, weights: Weights, ops: Ops) -> None:
    """Rescale canonical weights in place; what the model computes stays the same but for rounding.

    s is a power of two, so that weights don't round; norm weights become float32. Left alone are a layer that no
    norm of its own feeds (``BlockKind.POST``), ``down`` behind an activation that isn't linear in ``up``, and
    ``down`` of experts.

    Args:
        spec: the model.
        weights: all of ``expected_weights``.
        ops: whose norms and gates run.
    """
    heard: dict[int, torch.Tensor] = {}

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        heard[id(weight)] = x.float().square().mean(0)
        return F.linear(x, weight, bias)

    ops = replace(ops, linear=linear, pack=as_is)
    ids = torch.randint(spec.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(SEED))
    if spec.bos_token_id is not None:
        ids[0] = spec.bos_token_id
    positions = torch.arange(TOKENS, device=weights["embed"].device)
    hidden = embedding(ids.to(positions.device), weights["embed"]) * spec.embed_scale
    ropes: dict[RopeSpec, int] = {}
    for i in range(len(spec.layers)):
        prefix = f"layers.{i}."
        own = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        layer = Layer(spec, i, prepare_layer(spec, i, dict(own), ops), ops, ropes, own["q"].dtype)
        angles = [Rope(rope, TOKENS, hidden.device).cos_sin(positions) for rope in ropes]
        hidden = layer.run(hidden, angles, _attend(spec.layers[i]), None)
        _rescale(spec, spec.layers[i], own, {name: heard[id(weight)] for name, weight in _products(layer).items()})
        weights.update({prefix + name: w for name, w in own.items()})
        heard.clear()


def _products(layer: Layer) -> dict[str, Weight]:
    """A layer's weights by the name under which their inputs are known."""
    if isinstance(layer.mlp, GatedMlp):
        return {"qkv": layer.qkv, "o": layer.o, "gate_up": layer.mlp.gate_up, "down": layer.mlp.down}
    return {"qkv": layer.qkv, "o": layer.o, "gate_up": layer.mlp.router}


def _attend(layer: LayerSpec) -> Attend:
    """Of every row to all rows up to it: windows and sinks make no difference to how loud channels are."""

    def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend


def _rescale(spec: ModelSpec, layer: LayerSpec, own: Weights, loudness: Loudness) -> None:
    attention, mlp = ("q", "k", "v"), ("gate", "up")
    if spec.block is BlockKind.PARALLEL:
        _behind_norm(spec, own, "attn_norm", attention + mlp, loudness["qkv"])
    elif spec.block is not BlockKind.POST:
        _behind_norm(spec, own, "attn_norm", attention, loudness["qkv"])
        _behind_norm(spec, own, "mlp_norm", mlp, loudness["gate_up"])
    if "down" in loudness and layer.mlp.activation is not Activation.CLAMPED_SWIGLU:
        s = _scale(loudness["down"], [own["down"]])
        own["down"] = own["down"] * s.to(own["down"].dtype)
        _divide_rows(own, "up", s)
    # Heads of a group read the same v.
    v = (layer.num_kv_heads, layer.num_heads // layer.num_kv_heads, layer.v_head_dim)
    loud = loudness["o"].view(v).mean(1).flatten()
    o = own["o"].unflatten(1, v)
    s = _scale(loud, [o.transpose(1, 2).flatten(2).flatten(0, 1)])
    own["o"] = (o * s.to(o.dtype).view(v[0], 1, v[2])).flatten(1)
    _divide_rows(own, "v", s)


def _behind_norm(spec: ModelSpec, own: Weights, norm: str, names: tuple[str, ...], loud: torch.Tensor) -> None:
    """Move loudness from a norm's output [hidden] to the linear layers that read it."""
    s = _scale(loud, [own[name].flatten(0, -2) for name in names])
    for name in (*names, "router") if "gate" in names and "router" in own else names:
        own[name] = own[name] * s.to(own[name].dtype)
    one = 1.0 if spec.norm is NormKind.RMS_PLUS_ONE else 0.0
    own[norm] = (own[norm].float() + one) / s - one


def _divide_rows(own: Weights, name: str, s: torch.Tensor) -> None:
    own[name] = own[name] / s.to(own[name].dtype)[:, None]
    if f"{name}_bias" in own:
        own[f"{name}_bias"] = own[f"{name}_bias"] / s.to(own[f"{name}_bias"].dtype)


def _scale(loud: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """s [inputs] float32, of mean squares of activations [inputs] and weights [outputs, inputs]."""
    rows = sum(len(weight) for weight in weights)
    own = torch.stack([weight.float().square().sum(0) for weight in weights]).sum(0) / rows
    x, w = (part.clamp(min=FLOOR**2 * part.max().item()).clamp(min=1e-30) for part in (loud, own))
    wanted = EXPONENT / 2 * (x.log2() - w.log2())
    return torch.exp2((wanted - wanted.mean()).round())
