"""Linear layers of packed weights in C++."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from sash.ops import base, packed, torch_ops
from sash.ops.base import Weight
from sash.ops.native import TYPES
from sash.ops.packed import KINDS, PANEL, PackedLinear


def pack(weight: torch.Tensor, quantization: str) -> Weight:
    """A CPU weight [out, in] in panels, as int8, int4 or in its own dtype (none); others stay as they are."""
    rounded = quantization != "none"
    kind = quantization if rounded else str(weight.dtype).removeprefix("torch.")
    if weight.device.type != "cpu" or kind not in KINDS:
        return weight
    if not rounded or weight.dtype not in TYPES:
        return packed.pack(weight, kind)
    import sash._native as _native

    weight = weight.contiguous()
    out = packed.empty(weight.shape[0], weight.shape[1], kind)
    described = describe(out)
    _native.pack_rounded(described.native, weight.data_ptr(), TYPES[weight.dtype], torch.get_num_threads())
    return out


def describe(weight: PackedLinear, bias: torch.Tensor | None = None) -> Described:
    """The kernels' description of a weight."""
    import sash._native as _native

    out = _native.Linear()
    out.kind = KINDS.index(weight.kind)
    out.inputs, out.outputs, out.block = weight.inputs, weight.outputs, weight.block
    tensors = [weight.weight]
    out.weight = weight.weight.data_ptr()
    for name in ("scale", "offset"):
        tensor = getattr(weight, name)
        if tensor is not None:
            setattr(out, name, tensor.data_ptr())
            tensors.append(tensor)
    if bias is not None:
        padded = F.pad(bias.float(), (0, -len(bias) % PANEL)).contiguous()
        out.bias = padded.data_ptr()
        tensors.append(padded)
    return Described(out, tuple(tensors))


@dataclass(frozen=True, slots=True)
class Described:
    """A description and the tensors whose addresses it holds."""

    native: Any
    tensors: tuple[torch.Tensor, ...]


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """x [N, in] times the weight, plus bias [out]: [N, out] in x's dtype. Weights that aren't packed go to torch."""
    if not isinstance(weight, PackedLinear):
        return torch_ops.linear(x, weight, bias)
    rows = x if x.dtype is torch.float32 and x.stride(-1) == 1 else x.float().contiguous()
    return product(rows, describe(weight, bias)).to(x.dtype)


def embedding(token_ids: torch.Tensor, weight: Weight) -> torch.Tensor:
    """See ``sash.ops.base.Ops``."""
    if not isinstance(weight, PackedLinear):
        return base.embedding(token_ids, weight)
    import sash._native as _native

    described = describe(weight)
    out = torch.empty(len(token_ids), weight.inputs)
    for row, token in zip(out, token_ids.tolist(), strict=True):
        _native.unpack_row(described.native, token, row.data_ptr())
    return out


def argmax(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """See ``sash.ops.base.argmax``."""
    if logits.device.type != "cpu" or logits.dtype is not torch.float32 or logits.stride(-1) != 1:
        return base.argmax(logits)
    import sash._native as _native

    rows, n = logits.shape
    return _native.argmax(logits.data_ptr(), logits.stride(0), rows, n, torch.get_num_threads())


def product(x: torch.Tensor, weight: Described, room: torch.Tensor | None = None) -> torch.Tensor:
    """x [N, in] float32 times a described weight: [N, out] float32, a view of rows padded to whole panels, in
    ``room`` [N or more, padded out] where that is given."""
    import sash._native as _native

    native = weight.native
    width = -(-native.outputs // PANEL) * PANEL
    out = torch.empty(x.shape[0], width) if room is None else room[: x.shape[0]]
    _native.linear(native, x.data_ptr(), x.stride(0), x.shape[0], out.data_ptr(), width, torch.get_num_threads())
    return out[:, : native.outputs]
