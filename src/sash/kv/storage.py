"""KVPool: the tensors behind one group's pages."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sash.spec.groups import GroupSpec

# Rows or slots: int64 [n], or a slice where they are neighbours, which copies without a gather.
Index = torch.Tensor | slice


# quantise(x [N, H, D] float) -> int8 [N, H, D] and scales [N, H] float32.
Quantise = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Planes:
    """What one layer stores: k [H, slots, D] and v [H, slots, Dv], views of its pool; where they are int8,
    row times scale is the value, with scales [H, slots] float32."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class KVRows:
    """A step's K [N, H, D] and V [N, H, Dv] as the pool stores rows, scales [N, H] where it has them.

    Rows are rounded once, before anything attends to them or stores them: a row has one value in
    hand and in the pool, so that results don't depend on how a prompt is cut into chunks. Keys of an int8 pool
    come rotated, see ``key_block``.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


# Keys of int8 pools are rotated in blocks of at most so many dimensions.
_MAX_BLOCK = 256


def key_block(planes: Planes) -> int:
    """Block by which keys are to be rotated before these planes store them, and queries before they meet them
    (``sash.ops.packed.rotate``): the largest power of two that divides D, at most 256; 1 where rows aren't int8.

    A key has a few large dimensions, which would leave the others little of a row's 255 numbers. A rotation spreads
    them, and the product of two rotated vectors is that of the vectors (QuaRot, arXiv 2404.00456).
    """
    dim = planes.k.shape[-1]
    return min(dim & -dim, _MAX_BLOCK) if planes.k.dtype == torch.int8 else 1


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, H, D] to int8 [N, H, D] and a scale per row and head [N, H] float32, the largest size / 127.

    A row that is not finite gets a scale of NaN, so that it is noticed as it would have been.
    """
    x = x.float()
    highest = x.abs().amax(-1).clamp_min(1e-30)
    finite = torch.isfinite(highest)
    # A number over a tensor would be rounded twice, as its inverse and as the product.
    by = torch.where(finite, torch.full_like(highest, 127.0) / highest, 0.0)
    whole = (x.nan_to_num(0.0, 0.0, 0.0) * by.unsqueeze(-1)).round_().to(torch.int8)
    return whole, torch.where(finite, highest / 127.0, math.nan)


def restored(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Stored rows [..., D] with their scales [...] as numbers of ``dtype``."""
    return x.to(dtype) if scale is None else (x.float() * scale.unsqueeze(-1)).to(dtype)


class KVPool:
    """Planes k [layers, H, slots, D] and v [layers, H, slots, Dv]; slot = page · page_size + offset. An int8
    pool has planes of scales too, k_scale and v_scale [layers, H, slots] float32.

    Memory is not touched before rows are written, so an idle pool costs nothing on the CPU.
    ``layer`` arguments count within the group.
    """

    def __init__(
        self, group: GroupSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.page_size = page_size
        lead = (len(group.layers), group.num_kv_heads, num_pages * page_size)
        self.k = torch.empty(*lead, group.head_dim, dtype=dtype, device=device)
        self.v = torch.empty(*lead, group.v_head_dim, dtype=dtype, device=device)
        self.k_scale = torch.empty(lead, device=device) if dtype == torch.int8 else None
        self.v_scale = torch.empty(lead, device=device) if dtype == torch.int8 else None
        every = (self.k, self.v, self.k_scale, self.v_scale)
        self.planes = tuple(plane for plane in every if plane is not None)
        self.layers = tuple(Planes(*parts) for parts in zip(*self.planes, strict=True))

    @property
    def num_bytes(self) -> int:
        """Bytes of all planes."""
        return sum(plane.numel() * plane.element_size() for plane in self.planes)

    def rows(self, k: torch.Tensor, v: torch.Tensor, quantise: Quantise = quantise) -> KVRows:
        """K [N, H, D] and V [N, H, Dv] of a step as this pool stores them."""
        if self.k.dtype != torch.int8:
            return KVRows(k.to(self.k.dtype), v.to(self.v.dtype))
        (k, k_scale), (v, v_scale) = quantise(k), quantise(v)
        return KVRows(k, v, k_scale, v_scale)

    def write(self, layer: int, rows: KVRows, which: Index, slots: Index) -> None:
        """Store rows ``which`` at ``slots``."""
        planes = self.layers[layer]
        planes.k[:, slots] = rows.k[which].transpose(0, 1)
        planes.v[:, slots] = rows.v[which].transpose(0, 1)
        for plane, scale in ((planes.k_scale, rows.k_scale), (planes.v_scale, rows.v_scale)):
            if plane is not None and scale is not None:
                plane[:, slots] = scale[which].T

    def copy_pages(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copy whole pages (source, target) in every layer."""
        size = self.page_size
        for source, target in pairs:
            for plane in self.planes:
                plane[:, :, target * size : (target + 1) * size] = plane[:, :, source * size : (source + 1) * size]
