"""KVPool: the tensors behind one group's pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sash.spec.groups import GroupSpec

# Rows or slots: int64 [n], or a slice where they are neighbours, which copies without a gather.
Index = torch.Tensor | slice


@dataclass(frozen=True, slots=True)
class Planes:
    """What one layer stores: k [H, slots, D] and v [H, slots, Dv], views of its pool."""

    k: torch.Tensor
    v: torch.Tensor


class KVPool:
    """Planes k [layers, H, slots, D] and v [layers, H, slots, Dv]; slot = page · page_size + offset.

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
        self.layers = tuple(Planes(k, v) for k, v in zip(self.k, self.v, strict=True))

    @property
    def num_bytes(self) -> int:
        """Bytes of both planes."""
        return self.k.numel() * self.k.element_size() + self.v.numel() * self.v.element_size()

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, rows: Index, slots: Index) -> None:
        """Store rows ``rows`` of k [N, H, D] and v [N, H, Dv] at ``slots``."""
        planes = self.layers[layer]
        planes.k[:, slots] = k[rows].transpose(0, 1)
        planes.v[:, slots] = v[rows].transpose(0, 1)

    def copy_pages(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copy whole pages (source, target) in every layer."""
        size = self.page_size
        for source, target in pairs:
            for plane in (self.k, self.v):
                plane[:, :, target * size : (target + 1) * size] = plane[:, :, source * size : (source + 1) * size]
