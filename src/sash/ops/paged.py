"""PagedBatch: one KV group's attention in one step, as positions and slots. Shared by all its layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from sash.spec.span import BoundSpan


@dataclass(frozen=True, slots=True)
class Segment:
    """One request's queries and the keys they may see.

    Queries stand at positions ``q_start`` … in rows ``q_row`` … of q. Keys in hand stand at
    ``kv_start`` … in rows ``kv_row`` … of k and v; ``kv_count`` 0 means that every key, the query's
    own included, is in the pool already. ``past_positions`` [L] ascend and lie before the keys in
    hand; ``past_slots`` [L] are their places in the pool. Both int64 on the CPU: they hold every
    row that ``bound`` lets these queries see, and possibly more.
    """

    bound: BoundSpan
    q_row: int
    q_start: int
    q_count: int
    kv_row: int
    kv_start: int
    kv_count: int
    past_positions: torch.Tensor
    past_slots: torch.Tensor

    def bounds(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """First and last visible position [count] of queries ``first`` … (indices in the segment)."""
        positions = range(self.q_start + first, self.q_start + first + count)
        firsts = torch.tensor([self.bound.first(q) for q in positions])
        return firsts, torch.tensor([self.bound.last(q) for q in positions])

    def mask(self, first: int, count: int, keys: torch.Tensor) -> torch.Tensor:
        """Which of the key positions [L] each query sees: bool [count, L]."""
        firsts, lasts = self.bounds(first, count)
        return (keys <= lasts[:, None]) & ((keys < self.bound.sinks) | (keys >= firsts[:, None]))


@dataclass(slots=True)
class PagedBatch:
    """All segments of one KV group in one step. ``cache`` is for what a backend derives once and
    uses for every layer of the group."""

    segments: tuple[Segment, ...]
    cache: dict[Any, Any] = field(default_factory=dict)
