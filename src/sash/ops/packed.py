"""Weights of linear layers as the C++ kernels read them: in panels of 64 outputs, perhaps as int8.

int8 weights have a scale per output, activations one per row, both after a rotation of the inputs by
Hadamard matrices (QuaRot, arXiv 2404.00456): a rotation spreads an outlier over its whole block,
and the product of two rotated vectors is that of the vectors. The block is the largest power of
two that divides the number of inputs, up to ``MAX_BLOCK``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

PANEL = 64
MAX_BLOCK = 4096
KINDS = ("float32", "bfloat16", "int8")
# Outputs that are converted at once, so that the float32 copy of a large head stays small.
_SLAB = 16_384


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Weights [outputs, inputs], padded with zeros to whole panels and to whole groups of inputs.

    weight: [panels, inputs / group, 64, group] with groups of 1 (float32), 2 (bfloat16) or 4 (int8).
    scale [panels · 64] float32 and offset [panels · 64] int32 belong to int8: a weight is worth
    scale, and offset is 128 times the sum of an output's weights, because activations are stored
    plus 128.
    """

    kind: str
    outputs: int
    inputs: int
    weight: torch.Tensor
    block: int = 1
    scale: torch.Tensor | None = None
    offset: torch.Tensor | None = None

    def rows(self) -> torch.Tensor:
        """The stored numbers, unscaled and still rotated: [outputs, inputs]."""
        flat = self.weight.transpose(1, 2).flatten(0, 1).flatten(1)
        return flat[: self.outputs, : self.inputs]

    def lookup(self, outputs: torch.Tensor) -> torch.Tensor:
        """What ``dequantised`` has for some outputs (ids [N]): [N, inputs] float32."""
        rows = self.weight[outputs // PANEL, :, outputs % PANEL].flatten(1)[:, : self.inputs].float()
        return rows if self.scale is None else rotate(rows * self.scale[outputs, None], self.block)

    def dequantised(self) -> torch.Tensor:
        """The weights that these stand for: [outputs, inputs] float32."""
        rows = self.rows().float()
        return rows if self.scale is None else rotate(rows * self.scale[: self.outputs, None], self.block)


def empty(outputs: int, inputs: int, kind: str) -> PackedLinear:
    """Room for weights [outputs, inputs]; padding is zero already, weights are not."""
    group = {"float32": 1, "bfloat16": 2, "int8": 4}[kind]
    dtype = torch.int8 if kind == "int8" else getattr(torch, kind)
    panels = -(-outputs // PANEL)
    whole = outputs % PANEL == 0 and inputs % group == 0
    weight = (torch.empty if whole else torch.zeros)(panels, -(-inputs // group), PANEL, group, dtype=dtype)
    if kind != "int8":
        return PackedLinear(kind, outputs, inputs, weight)
    # The largest power of two that divides the inputs.
    block = min(inputs & -inputs, MAX_BLOCK)
    scale, offset = torch.zeros(panels * PANEL), torch.zeros(panels * PANEL, dtype=torch.int32)
    return PackedLinear(kind, outputs, inputs, weight, block, scale, offset)


def pack(weight: torch.Tensor, kind: str) -> PackedLinear:
    """A weight [outputs, inputs] in panels. ``kind`` int8 quantises it; the others only round to their dtype."""
    packed = empty(weight.shape[0], weight.shape[1], kind)
    for first in range(0, packed.outputs, _SLAB):
        rows = weight[first : first + _SLAB]
        if packed.scale is not None and packed.offset is not None:
            part = slice(first, first + len(rows))
            rows, packed.scale[part] = quantise(rows, packed.block)
            packed.offset[part] = 128 * rows.sum(-1, dtype=torch.int32)
        panels = packed.weight[first // PANEL : -(-(first + len(rows)) // PANEL)]
        padding = (0, -packed.inputs % panels.shape[3], 0, len(panels) * PANEL - len(rows))
        panels.copy_(
            F.pad(rows.to(panels.dtype), padding).view(len(panels), PANEL, -1, panels.shape[3]).transpose(1, 2)
        )
    return packed


def quantise(rows: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate and round rows [N, inputs]: int8 [N, inputs], and what 1 is worth in each row, float32 [N]."""
    rotated = rotate(rows.float(), block)
    scale = rotated.abs().amax(-1) / 127
    whole = rotated / torch.where(scale > 0, scale, 1.0)[:, None]
    return whole.round_().to(torch.int8), scale


def rotate(x: torch.Tensor, block: int) -> torch.Tensor:
    """x [..., n] times an orthonormal Hadamard matrix in blocks of ``block``; its own inverse. Same dtype."""
    out = x
    step = 1
    while step < block:
        a, b = out.unflatten(-1, (-1, 2, step)).unbind(-2)
        out = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        step *= 2
    return out / math.sqrt(block) if block > 1 else out


def linear(x: torch.Tensor, weight: PackedLinear, bias: torch.Tensor | None) -> torch.Tensor:
    """x [N, inputs] times the weights, plus bias [outputs]: [N, outputs] in x's dtype. The reference of the kernel.

    int8 activations are rounded half up, per row: floor(127 · x / max|x| + 1/2).
    """
    if weight.scale is None:
        out = x.to(weight.weight.dtype).double() @ weight.rows().double().T
    else:
        rotated = rotate(x.float(), weight.block)
        step = rotated.abs().amax(-1, keepdim=True) / 127
        whole = (rotated / torch.where(step > 0, step, 1.0) + 0.5).floor()
        out = whole.double() @ weight.rows().double().T
        out = out * (step * weight.scale[: weight.outputs])
    return (out if bias is None else out + bias).to(x.dtype)
