"""The table of ops. One signature per op; a backend is one filled table.

``reference`` is dense, float32 and obvious: the oracle. ``torch`` runs anywhere. The decoder and
the runner call ops through the table they were given, so a whole engine can run on either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sash.kv.storage import Quantise, quantise


def as_is(weight: torch.Tensor) -> torch.Tensor:
    """The weight, unpacked: what a table does whose ``linear`` has no layout of its own."""
    return weight


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of every op.

    linear(x [N, in], weight [out, in], bias [out] | None) -> [N, out]
    rms_norm(x [..., D], weight [D] or broadcasting, eps) -> [..., D]   statistics in float32
    layer_norm(x [..., D], weight [D], eps) -> [..., D]               no bias (Cohere)
    rope(x [N, H, D], cos [N, R/2], sin [N, R/2], interleaved: bool) -> [N, H, D]
    gated(gate_up [N, 2I], activation) -> [N, I]                      gate first, then up
    pack(weight [out, in]) -> the weight as this table's linear reads it fastest; may be opaque
    attention: see ``sash.ops.attention_reference.attention``
    quantise: see ``sash.kv.storage.quantise``
    ``note`` says why this table, or on which instruction set.
    """

    name: str
    linear: Callable[..., torch.Tensor]
    rms_norm: Callable[..., torch.Tensor]
    layer_norm: Callable[..., torch.Tensor]
    rope: Callable[..., torch.Tensor]
    gated: Callable[..., torch.Tensor]
    attention: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    pack: Callable[[torch.Tensor], torch.Tensor] = as_is
    quantise: Quantise = quantise
    note: str = ""
