"""Ops whose result for a row does not depend on what else is in the batch, bit for bit.

Every product has one fixed shape: rows go in blocks of ``_ROWS``, padded with zeros, and keys in
blocks of ``_KEYS`` at absolute positions, joined in order by an online softmax. A block that a row
does not see changes nothing in it: its weights are exactly 0.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from sash.kv.storage import KVRows, Planes
from sash.ops.attention_reference import segment_rows
from sash.ops.paged import PagedBatch, Segment

_ROWS = 32
_KEYS = 64
# In narrower products MKL adds up in an order that depends on a row's place in its block.
_COLUMNS = 16


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [N, in] · weight [out, in]ᵀ + bias [out], ``_ROWS`` rows at a time: [N, out]."""
    rows, columns = x.shape[0], weight.shape[0]
    if columns < _COLUMNS:
        weight = F.pad(weight, (0, 0, 0, _COLUMNS - columns))
        bias = None if bias is None else F.pad(bias, (0, _COLUMNS - columns))
    padded = F.pad(x, (0, 0, 0, -rows % _ROWS))
    out = [F.linear(padded[a : a + _ROWS], weight, bias) for a in range(0, padded.shape[0], _ROWS)]
    return torch.cat(out)[:rows, :columns] if out else x.new_zeros(0, columns)


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
    """See ``sash.ops.attention_reference.attention``; float32 throughout."""
    heads = rows.k.shape[1]
    folded = q.shape[1] // heads
    out = torch.zeros(q.shape[0], heads, folded, rows.v.shape[2], device=q.device)
    lse = torch.zeros(q.shape[0], heads, folded, device=q.device)
    folded_q = q.reshape(q.shape[0], heads, folded, q.shape[2]).float()
    for seg in batch.segments:
        if not seg.q_count:
            continue
        keys = segment_rows(seg, rows.k, rows.k_scale, planes.k, planes.k_scale, torch.float32)
        values = segment_rows(seg, rows.v, rows.v_scale, planes.v, planes.v_scale, torch.float32)
        blocks = _key_blocks(seg, keys, values)
        for a in range(0, seg.q_count, _ROWS):
            count = min(_ROWS, seg.q_count - a)
            where = slice(seg.q_row + a, seg.q_row + a + count)
            block_q = F.pad(folded_q[where], (0, 0, 0, 0, 0, 0, 0, _ROWS - count))
            part, total = _rows(seg, a, count, block_q, blocks, scale, softcap)
            out[where], lse[where] = part[:count], total[:count]
    if sink_logits is not None:
        # torch.sigmoid rounds by an element's place in the tensor; exp, + and / don't.
        out /= 1 + torch.exp(sink_logits.float().view(heads, folded) - lse).unsqueeze(-1)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1)


_Block = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _key_blocks(seg: Segment, keys: torch.Tensor, values: torch.Tensor) -> list[_Block]:
    """Positions [_KEYS], K [H, _KEYS, D] and V [H, _KEYS, Dv] of each block that holds one of the segment's
    keys [H, L, D] and values [H, L, Dv]; a place without a key has position -1 and zeros."""
    positions = torch.cat([seg.past_positions, torch.arange(seg.kv_start, seg.kv_start + seg.kv_count)])
    numbers, blocks = positions // _KEYS, []
    for number in torch.unique(numbers).tolist():
        here = torch.nonzero(numbers == number).flatten()
        offset, here = (positions[here] % _KEYS).to(keys.device), here.to(keys.device)
        placed = torch.full((_KEYS,), -1, dtype=torch.int64)
        placed[offset.cpu()] = positions[here.cpu()]
        block_k = keys.new_zeros(keys.shape[0], _KEYS, keys.shape[2]).index_copy_(1, offset, keys[:, here])
        block_v = values.new_zeros(values.shape[0], _KEYS, values.shape[2]).index_copy_(1, offset, values[:, here])
        blocks.append((placed, block_k, block_v))
    return blocks


def _rows(
    seg: Segment, first: int, count: int, q: torch.Tensor, blocks: list[_Block], scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``_ROWS`` queries q [_ROWS, H, G, D] over all blocks: out [_ROWS, H, G, Dv] and lse [_ROWS, H, G]."""
    rows, heads, folded, _ = q.shape
    flat = q.permute(1, 0, 2, 3).reshape(heads, rows * folded, -1)
    best = flat.new_full((heads, rows * folded), -math.inf)
    weight = torch.zeros_like(best)
    total = flat.new_zeros(heads, rows * folded, blocks[0][2].shape[2])
    for placed, keys, values in blocks:
        seen = F.pad(seg.mask(first, count, placed) & (placed >= 0), (0, 0, 0, rows - count)).to(q.device)
        if not seen.any():
            continue
        logits = torch.bmm(flat, keys.transpose(1, 2)) * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~seen.repeat_interleave(folded, 0), -math.inf)
        new = torch.maximum(best, logits.amax(-1))
        # A row that has seen nothing yet has best = new = -inf; its factor and weights are 0.
        base = new.masked_fill(new == -math.inf, 0.0)
        factor = torch.exp(best - base)
        chunk = torch.exp(logits - base.unsqueeze(-1))
        weight = weight * factor + chunk.sum(-1)
        total = total * factor.unsqueeze(-1) + torch.bmm(chunk, values)
        best = new
    out = (total / weight.clamp_min(1e-38).unsqueeze(-1)).view(heads, rows, folded, -1).permute(1, 0, 2, 3)
    return out, (best + weight.log()).view(heads, rows, folded).permute(1, 0, 2)
