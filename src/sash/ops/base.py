"""The table of ops. One signature per op; a backend is one filled table.

``reference`` is dense, float32 and obvious: the oracle. ``torch`` runs anywhere. The decoder and
the runner call ops through the table they were given, so a whole engine can run on either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sash.kv.storage import Quantise, quantise
from sash.ops.packed import PackedLinear
from sash.ops.sampling import Race, race

Weight = torch.Tensor | PackedLinear


def as_is(weight: torch.Tensor) -> Weight:
    """The weight, unpacked: what a table does whose ``linear`` has no layout of its own."""
    return weight


def embedding(token_ids: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Rows ``token_ids`` [N] of a weight [vocabulary, hidden], packed or not: [N, hidden] float32."""
    if isinstance(weight, PackedLinear):
        return weight.lookup(token_ids)
    return F.embedding(token_ids, weight).float()


def argmax(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """Of each row of [N, V] float32: the index of its largest (the first of equals), and its value; NaN where
    the row holds one."""
    best = logits.max(-1)
    return best.indices.tolist(), best.values.tolist()


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of every op.

    linear(x [N, in], weight [out, in], bias [out] | None) -> [N, out]
    rms_norm(x [..., D], weight [D] or broadcasting, eps) -> [..., D]   statistics in float32
    layer_norm(x [..., D], weight [D], eps) -> [..., D]               no bias (Cohere)
    rope(x [N, H, D], cos [N, R/2], sin [N, R/2], interleaved: bool) -> [N, H, D]
    gated(gate_up [N, 2I], activation) -> [N, I]                      gate first, then up
    pack(weight [out, in]) -> the weight as this table's linear reads it fastest; may be opaque
    pack_head: the same for the head, which tolerates less rounding; None: as every other weight
    embedding(token_ids [N], weight [out, in]) -> [N, in] float32     of a plain weight or a PackedLinear
    looks_up: whether embedding finds rows in what pack and pack_head make; then tied embeddings are held once
    argmax(logits [N, V]) -> N indices and values of the largest; NaN or infinite where a row holds such
    race(logits [V], temperature, seed, position) -> a token drawn from the whole distribution
    attention: see ``sash.ops.attention_reference.attention``
    quantise: see ``sash.kv.storage.quantise``
    ``quantization`` is what ``pack`` rounds to. ``note`` says why this table, or on which instruction set.
    """

    name: str
    linear: Callable[..., torch.Tensor]
    rms_norm: Callable[..., torch.Tensor]
    layer_norm: Callable[..., torch.Tensor]
    rope: Callable[..., torch.Tensor]
    gated: Callable[..., torch.Tensor]
    attention: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    pack: Callable[[torch.Tensor], Weight] = as_is
    pack_head: Callable[[torch.Tensor], Weight] | None = None
    embedding: Callable[[torch.Tensor, Weight], torch.Tensor] = embedding
    argmax: Callable[[torch.Tensor], tuple[list[int], list[float]]] = argmax
    race: Race = race
    quantization: str = "none"
    looks_up: bool = False
    quantise: Quantise = quantise
    note: str = ""
