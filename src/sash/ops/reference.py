"""Reference ops: dense, float32, obvious. The oracle that every faster version is tested against.

Attention has a file of its own, ``sash.ops.attention_reference``.
"""

from __future__ import annotations

import math

import torch

from sash.spec.model import Activation

SWIGLU_LIMIT = 7.0
SWIGLU_ALPHA = 1.702


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [N, in] times weight [out, in] plus bias [out]: [N, out] in x's dtype, summed in float32."""
    y = x.float() @ weight.float().T
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D] over its root mean square, times weight: x's shape and dtype.

    ``weight`` is [D], or anything that broadcasts over x, such as [H, D] for one weight per head.
    """
    x32, w32 = x.float(), weight.float()
    rms = torch.sqrt((x32 * x32).mean(dim=-1, keepdim=True) + eps)
    return (x32 / rms * w32).to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D] less its mean, over its standard deviation, times weight [D]: x's shape and dtype."""
    x32 = x.float()
    centred = x32 - x32.mean(dim=-1, keepdim=True)
    variance = (centred * centred).mean(dim=-1, keepdim=True)
    return (centred / torch.sqrt(variance + eps) * weight.float()).to(x.dtype)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the first R of D dimensions of x [N, H, D] by the angles of cos and sin [N, R/2].

    Pair i is (i, i + R/2), or (2i, 2i + 1) when ``interleaved``. Same shape and dtype as x.
    """
    half = cos.shape[-1]
    out = x.float().clone()
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        a, b = x[..., first].float(), x[..., second].float()
        c, s = cos[:, None, i].float(), sin[:, None, i].float()
        out[..., first] = a * c - b * s
        out[..., second] = b * c + a * s
    return out.to(x.dtype)


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(gate) times up, of gate_up [N, 2I] with the gate first: [N, I] in gate_up's dtype."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    match activation:
        case Activation.SILU:
            out = gate / (1 + torch.exp(-gate)) * up
        case Activation.GELU:
            out = 0.5 * gate * (1 + torch.erf(gate / math.sqrt(2))) * up
        case Activation.GELU_TANH:
            inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
            out = 0.5 * gate * (1 + torch.tanh(inner)) * up
        case Activation.CLAMPED_SWIGLU:
            gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
            out = gate / (1 + torch.exp(-SWIGLU_ALPHA * gate)) * (up + 1)
    return out.to(gate_up.dtype)
