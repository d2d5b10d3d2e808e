"""Weights of linear layers as the C++ kernels read them: in panels of 64 outputs, perhaps as int8 or int4.

int8 weights have a scale per output, int4 weights two numbers per group of inputs (``sash.ops.packed4``), activations
are int8 with a scale per row; all that after a rotation of the inputs by Hadamard matrices (QuaRot, arXiv 2404.00456):
a rotation spreads an outlier over its whole block, and the product of two rotated vectors is that of the vectors. The
block is the largest power of two that divides the number of inputs, up to ``MAX_BLOCK``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sash.ops import packed4

PANEL = 64
MAX_BLOCK = 4096
KINDS = ("float32", "bfloat16", "int8", "int4")
# Kinds whose inputs are rotated and whose activations are rounded to int8.
ROUNDED = ("int8", "int4")
# Outputs that are converted at once, so that the float32 copy of a large head stays small.
_SLAB = 16_384


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Weights [outputs, inputs], padded with zeros to whole panels and to whole groups of inputs.

    weight: [panels, inputs / group, 64, group] with groups of 1 (float32), 2 (bfloat16) or 4 (int8).
    scale [panels · 64] float32 and offset [panels · 64] int32 belong to int8: a weight is worth
    scale, and offset is 128 times the sum of an output's weights, because activations are stored
    plus 128. int4: weight as ``packed4.shape`` says, and scale is what ``packed4.pack`` returns.
    """

    kind: str
    outputs: int
    inputs: int
    weight: torch.Tensor
    block: int = 1
    scale: torch.Tensor | None = None
    offset: torch.Tensor | None = None

    @property
    def rounded(self) -> bool:
        """Whether the inputs are rotated and activations rounded to int8."""
        return self.kind in ROUNDED

    def rows(self) -> torch.Tensor:
        """The stored numbers, still rotated; int8 unscaled: [outputs, inputs]."""
        if self.kind == "int4":
            return packed4.unpack(self.weight)[: self.outputs, : self.inputs]
        flat = self.weight.transpose(1, 2).flatten(0, 1).flatten(1)
        return flat[: self.outputs, : self.inputs]

    def lookup(self, outputs: torch.Tensor) -> torch.Tensor:
        """What ``dequantised`` has for some outputs (ids [N]): [N, inputs] float32."""
        panel, place = outputs // PANEL, outputs % PANEL
        if self.kind == "int4":
            whole = packed4.unpack(self.weight[panel]).unflatten(0, (-1, PANEL))
            return rotate(whole[torch.arange(len(place)), place, : self.inputs], self.block)
        rows = self.weight[panel, :, place].flatten(1)[:, : self.inputs].float()
        return rotate(rows * self.scale[outputs, None], self.block) if self.scale is not None else rows

    def dequantised(self) -> torch.Tensor:
        """The weights that these stand for: [outputs, inputs] float32."""
        rows = self.rows().float()
        if self.kind == "int8" and self.scale is not None:
            rows = rows * self.scale[: self.outputs, None]
        return rotate(rows, self.block) if self.rounded else rows


def empty(outputs: int, inputs: int, kind: str) -> PackedLinear:
    """Room for weights [outputs, inputs]; padding is zero already, weights are not."""
    panels = -(-outputs // PANEL)
    # The largest power of two that divides the inputs.
    block = min(inputs & -inputs, MAX_BLOCK)
    scale = torch.zeros(panels * PANEL)
    if kind == "int4":
        weight = torch.zeros(packed4.shape(panels, inputs, PANEL), dtype=torch.uint8)
        return PackedLinear(kind, outputs, inputs, weight, block, scale)
    group = {"float32": 1, "bfloat16": 2, "int8": 4}[kind]
    dtype = torch.int8 if kind == "int8" else getattr(torch, kind)
    whole = outputs % PANEL == 0 and inputs % group == 0
    weight = (torch.empty if whole else torch.zeros)(panels, -(-inputs // group), PANEL, group, dtype=dtype)
    if kind != "int8":
        return PackedLinear(kind, outputs, inputs, weight)
    return PackedLinear(kind, outputs, inputs, weight, block, scale, torch.zeros(panels * PANEL, dtype=torch.int32))


def pack(weight: torch.Tensor, kind: str) -> PackedLinear:
    """A weight [outputs, inputs] in panels. int8 and int4 round it; the others only to their dtype."""
    packed = empty(weight.shape[0], weight.shape[1], kind)
    for first in range(0, packed.outputs, _SLAB):
        rows = weight[first : first + _SLAB]
        part = slice(first, first + len(rows))
        panels = packed.weight[first // PANEL : -(-(first + len(rows)) // PANEL)]
        if kind == "int4" and packed.scale is not None:
            packed.scale[part] = packed4.pack(rotate(rows.float(), packed.block), panels)
            continue
        if packed.scale is not None and packed.offset is not None:
            rows, packed.scale[part] = quantise(rows, packed.block)
            packed.offset[part] = 128 * rows.sum(-1, dtype=torch.int32)
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

    Activations of int8 and int4 weights are rounded half up, per row: floor(127 · x / max|x| + 1/2).
    """
    if not weight.rounded:
        out = x.to(weight.weight.dtype).double() @ weight.rows().double().T
    else:
        rotated = rotate(x.float(), weight.block)
        step = rotated.abs().amax(-1, keepdim=True) / 127
        whole = (rotated / torch.where(step > 0, step, 1.0) + 0.5).floor()
        out = whole.double() @ weight.rows().double().T * step
        if weight.kind == "int8" and weight.scale is not None:
            out = out * weight.scale[: weight.outputs]
    return (out if bias is None else out + bias).to(x.dtype)
