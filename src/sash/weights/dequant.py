"""ggml blocks to floating point, a block of rows at a time.

Layouts: github.com/ggml-org/ggml, ggml-common.h. Products and sums round in float32 in the order of ggml's own
dequantisers, so the answers are theirs bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sash.spec.errors import ModelError
from sash.spec.ggml import BLOCKS, GgmlType

CHUNK_ELEMENTS = 1 << 18


def dequantize(data: memoryview, kind: GgmlType, out: Tensor) -> None:
    """Decode ``data`` into ``out`` (contiguous, float32, bfloat16 or float16; rounded once, to nearest even).

    Raises:
        ModelError: a type sash has no decoder for, or a size that isn't ``out``'s.
    """
    block, size = BLOCKS[kind]
    decode = _DECODERS.get(kind)
    if decode is None:
        raise ModelError(f"tensor type {kind.name} can't be decoded; use a file with {', '.join(supported_types())}")
    flat = out.view(-1)
    if flat.numel() // block * size != len(data):
        raise ModelError(f"{len(data)} bytes of {kind.name} don't hold {flat.numel()} elements")
    step = max(1, CHUNK_ELEMENTS // block)
    for first in range(0, len(data) // size, step):
        # A copy: torch wants writable memory, the file is mapped read-only.
        raw = torch.frombuffer(bytearray(data[first * size : (first + step) * size]), dtype=torch.uint8)
        values = decode(raw.view(-1, size))
        flat[first * block : first * block + values.numel()].copy_(values.view(-1))


def supported_types() -> tuple[str, ...]:
    """Names of the types that ``dequantize`` decodes."""
    return tuple(kind.name for kind in _DECODERS)


def _half(raw: Tensor, at: int) -> Tensor:
    """The float16 at byte ``at`` of every block, as float32 [n, 1]."""
    return raw[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[n, g, b] bytes to [n, g, 2, b]: low halves, then high halves."""
    return torch.stack((packed & 15, packed >> 4), 2)


def _bits(packed: Tensor) -> Tensor:
    """[n, b] bytes to [n, b, 8] bits, lowest first."""
    return (packed.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8)) & 1


def _f32(raw: Tensor) -> Tensor:
    return raw.view(torch.float32)


def _f16(raw: Tensor) -> Tensor:
    return raw.view(torch.float16)


def _bf16(raw: Tensor) -> Tensor:
    return raw.view(torch.bfloat16)


def _q4_0(raw: Tensor) -> Tensor:
    quants = _nibbles(raw[:, None, 2:]).view(torch.int8).view(-1, 32) - 8
    return _half(raw, 0) * quants


def _q4_1(raw: Tensor) -> Tensor:
    return (_half(raw, 0) * _nibbles(raw[:, None, 4:]).view(-1, 32)).add_(_half(raw, 2))


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    return _nibbles(low[:, None]).view(-1, 32) | (_bits(high).view(-1, 32) << 4)


def _q5_0(raw: Tensor) -> Tensor:
    quants = _five_bits(raw[:, 2:6], raw[:, 6:]).view(torch.int8) - 16
    return _half(raw, 0) * quants


def _q5_1(raw: Tensor) -> Tensor:
    return (_half(raw, 0) * _five_bits(raw[:, 4:8], raw[:, 8:])).add_(_half(raw, 2))


def _q8_0(raw: Tensor) -> Tensor:
    return _half(raw, 0) * raw[:, 2:].view(torch.int8)


def _scales_and_mins(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima [n, 8, 1] of Q4_K and Q5_K: eight pairs of 6 bits in bytes 4 to 15, times d and dmin.

    Bytes 0-3 and 4-7 hold the first four scales and minima in their low six bits; bytes 8-11 the low four bits of
    the last four of both, whose upper two bits are the upper two bits of bytes 0-7.
    """
    a, b, c = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = torch.cat((a & 63, (c & 15) | ((a >> 2) & 48)), 1)
    mins = torch.cat((b & 63, (c >> 4) | ((b >> 2) & 48)), 1)
    return (_half(raw, 0) * scales).unsqueeze(2), (_half(raw, 2) * mins).unsqueeze(2)


def _q4_k(raw: Tensor) -> Tensor:
    scales, mins = _scales_and_mins(raw)
    quants = _nibbles(raw[:, 16:].unflatten(1, (4, 32))).view(-1, 8, 32)
    return (scales * quants).sub_(mins)


def _q5_k(raw: Tensor) -> Tensor:
    scales, mins = _scales_and_mins(raw)
    low = _nibbles(raw[:, 48:].unflatten(1, (4, 32))).view(-1, 8, 32)
    high = _bits(raw[:, 16:48]).transpose(1, 2) << 4
    return (scales * (low | high)).sub_(mins)


def _q6_k(raw: Tensor) -> Tensor:
    """Halves of 128 elements: 64 bytes of low nibbles, 32 bytes of four 2-bit high parts each."""
    low = _nibbles(raw[:, :128].unflatten(1, (2, 64))).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    high = (raw[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts) & 3
    quants = (low | (high << 4)).view(torch.int8) - 32
    scales = _half(raw, 208) * raw[:, 192:208].view(torch.int8)
    return scales.unsqueeze(2) * quants.view(-1, 16, 16)


_DECODERS: Mapping[GgmlType, Callable[[Tensor], Tensor]] = {
    GgmlType.F32: _f32,
    GgmlType.F16: _f16,
    GgmlType.BF16: _bf16,
    GgmlType.Q4_0: _q4_0,
    GgmlType.Q4_1: _q4_1,
    GgmlType.Q5_0: _q5_0,
    GgmlType.Q5_1: _q5_1,
    GgmlType.Q8_0: _q8_0,
    GgmlType.Q4_K: _q4_k,
    GgmlType.Q5_K: _q5_k,
    GgmlType.Q6_K: _q6_k,
}
