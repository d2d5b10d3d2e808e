"""Attention over pages, dense and obvious, in float32: the oracle of every other version."""

from __future__ import annotations

import math

import torch

from sash.kv.storage import KVRows, Planes, restored
from sash.ops.paged import PagedBatch, Segment


def attention(
    q: torch.Tensor,
    rows: KVRows,
    planes: Planes,
    batch: PagedBatch,
    *,
    scale: float,
    softcap: float = 0.0,
    sink_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every segment's queries over its visible keys.

    Args:
        q: [Nq, Hq, D].
        rows: keys and values in hand, of the pool's types.
        planes: what the layer stores.
        batch: who attends to what.
        scale: multiplies the products.
        softcap: c · tanh(x / c) after the scale and before the mask; 0: none.
        sink_logits: [Hq] unscaled logits whose probability mass is dropped (gpt-oss).

    Returns:
        [Nq, Hq, Dv] in q's dtype, and the log-sum-exp of the visible logits, sink logits apart,
        [Nq, Hq] float32.
    """
    out = torch.zeros(q.shape[0], q.shape[1], rows.v.shape[2])
    lse = torch.zeros(q.shape[0], q.shape[1])
    groups = q.shape[1] // rows.k.shape[1]
    for seg in batch.segments:
        keys = segment_rows(seg, rows.k, rows.k_scale, planes.k, planes.k_scale, torch.float32)
        values = segment_rows(seg, rows.v, rows.v_scale, planes.v, planes.v_scale, torch.float32)
        positions = [*seg.past_positions.tolist(), *range(seg.kv_start, seg.kv_start + seg.kv_count)]
        for i in range(seg.q_count):
            seen = [j for j, p in enumerate(positions) if seg.bound.visible(seg.q_start + i, p)]
            for head in range(q.shape[1]):
                logits = keys[head // groups, seen] @ q[seg.q_row + i, head].float() * scale
                if softcap:
                    logits = softcap * torch.tanh(logits / softcap)
                total = torch.logsumexp(logits, 0)
                lse[seg.q_row + i, head] = total
                if sink_logits is not None:
                    total = torch.logaddexp(total, sink_logits[head].float())
                out[seg.q_row + i, head] = torch.exp(logits - total) @ values[head // groups, seen]
    return out.to(q.dtype), lse


def segment_rows(
    seg: Segment,
    hand: torch.Tensor,
    hand_scale: torch.Tensor | None,
    plane: torch.Tensor,
    plane_scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """K or V of a segment, its past rows of ``plane`` [H, slots, D], then its rows in ``hand`` [N, H, D]:
    [H, L, D] in ``dtype``."""
    own, slots = slice(seg.kv_row, seg.kv_row + seg.kv_count), seg.past_slots.to(plane.device)
    past_scale = None if plane_scale is None else plane_scale.index_select(1, slots)
    past = restored(plane.index_select(1, slots), past_scale, dtype)
    here = restored(hand[own], None if hand_scale is None else hand_scale[own], dtype)
    return torch.cat([past, here.transpose(0, 1)], 1)


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain masked attention in float32: q [..., Q, D], k [..., L, D], v [..., L, Dv], mask [Q, L] bool.

    Returns [..., Q, Dv] and the log-sum-exp [..., Q]; a row that sees nothing gives 0 and -inf.
    """
    logits = q.float() @ k.float().transpose(-1, -2) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~mask, -math.inf)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse.unsqueeze(-1)).nan_to_num(0.0)
    return weights @ v.float(), lse
