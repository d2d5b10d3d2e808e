"""Attention over pages with torch: blocks outside the window are skipped, a group's query heads are
folded into rows so that each key is read once per KV head, and no mask is larger than a block."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sash.kv.storage import KVRows, Planes, restored
from sash.ops.attention_reference import segment_rows
from sash.ops.paged import PagedBatch, Segment

# Rows (query heads of a group × queries) of one product; larger ones waste window, smaller ones time.
_BLOCK_ROWS = 256
# Keys that every query of a block sees go without a mask when there are at least so many.
_MASK_FREE_KEYS = 1024
# A request whose keys lie in one run this long is read in place, not gathered.
_RUN_KEYS = 1024


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
    """See ``sash.ops.attention_reference.attention``."""
    heads = rows.k.shape[1]
    folded = q.shape[1] // heads
    q = q.view(q.shape[0], heads, folded, q.shape[2])
    how = _How(scale, softcap)
    # A learned sink scales the result, which then rounds once, at the end.
    dtype = q.dtype if sink_logits is None else torch.float32
    result = _Result(
        torch.empty(*q.shape[:3], rows.v.shape[2], dtype=dtype, device=q.device),
        torch.empty(q.shape[:3], dtype=torch.float32, device=q.device),
    )
    for bucket in _buckets(batch, heads, planes.k.shape[1], q.dtype, q.device):
        keys, values = bucket.gather(planes, q.dtype)
        result.put(bucket.rows, *how.attend(q[bucket.rows], keys, values, bucket.mask))
    for seg in batch.segments:
        if seg.kv_count and seg.q_count:
            keys = segment_rows(seg, rows.k, rows.k_scale, planes.k, planes.k_scale, q.dtype).unsqueeze(0)
            values = segment_rows(seg, rows.v, rows.v_scale, planes.v, planes.v_scale, q.dtype).unsqueeze(0)
            for block in _blocks(batch, seg, folded, q.dtype, q.device):
                where = slice(seg.q_row + block.first, seg.q_row + block.first + block.count)
                result.put(where, *_attend_block(q[where], keys, values, block, how))
    out, lse = result.out, result.lse
    if sink_logits is not None:
        out *= torch.sigmoid(lse - sink_logits.float().view(heads, folded)).unsqueeze(-1)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1)


@dataclass(frozen=True, slots=True)
class _Result:
    """out [Nq, H, G, Dv] and lse [Nq, H, G] float32, filled row by row."""

    out: torch.Tensor
    lse: torch.Tensor

    def put(self, rows: torch.Tensor | slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        self.out[rows] = out.to(self.out.dtype)
        self.lse[rows] = lse


@dataclass(frozen=True, slots=True)
class _How:
    scale: float
    softcap: float

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [B, H, R, D], k [B, H, L, D], v [B, H, L, Dv], additive mask [B or 1, 1, R or 1, L].

        Every row sees a key. torch's fused CPU kernel has no soft cap and one head size.
        """
        if q.device.type == "cpu" and not self.softcap and k.shape[-1] == v.shape[-1]:
            if mask is not None:
                mask = mask.expand(-1, -1, q.shape[2], -1)
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, False, attn_mask=mask, scale=self.scale
            )
        logits = q.float() @ k.float().transpose(-1, -2) * self.scale
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if mask is not None:
            logits = logits + mask
        lse = torch.logsumexp(logits, -1)
        return torch.exp(logits - lse.unsqueeze(-1)) @ v.float(), lse


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Single-query segments of similar length, padded to the longest: ``index`` [B, H, L] flat rows of
    the pools, or ``run`` (start, length) when one segment's slots are neighbours."""

    rows: torch.Tensor
    index: torch.Tensor | None
    run: tuple[int, int]
    shape: tuple[int, int, int]
    mask: torch.Tensor | None

    def gather(self, planes: Planes, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K [B, H, L, D] and V [B, H, L, Dv]."""
        return self._take(planes.k, planes.k_scale, dtype), self._take(planes.v, planes.v_scale, dtype)

    def _take(self, plane: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        if self.index is None:
            own = None if scale is None else scale.narrow(1, *self.run)
            return restored(plane.narrow(1, *self.run), own, dtype).unsqueeze(0)
        own = None if scale is None else scale.flatten().index_select(0, self.index)
        return restored(plane.flatten(0, 1).index_select(0, self.index), own, dtype).view(*self.shape, -1)


def _buckets(batch: PagedBatch, heads: int, slots: int, dtype: torch.dtype, device: torch.device) -> list[_Bucket]:
    """Single-query segments in buckets; made once per batch."""
    if "buckets" not in batch.cache:
        singles = [s for s in batch.segments if s.q_count and not s.kv_count]
        singles.sort(key=lambda s: len(s.past_slots))
        buckets: list[list[Segment]] = []
        for seg in singles:
            length = len(seg.past_slots)
            same = buckets and not _is_run(seg) and not _is_run(buckets[-1][0])
            # Padding is read and multiplied like any key. Up to twice a request's own keys cost less than a call of
            # their own per request would; below 64, calls cost more than keys, so all such requests share one.
            if same and length <= 2 * len(buckets[-1][0].past_slots) + 64:
                buckets[-1].append(seg)
            else:
                buckets.append([seg])
        batch.cache["buckets"] = [_make_bucket(b, heads, slots, dtype, device) for b in buckets]
    return batch.cache["buckets"]


def _is_run(seg: Segment) -> bool:
    slots = seg.past_slots
    return (
        len(slots) >= _RUN_KEYS
        and int(slots[-1]) - int(slots[0]) == len(slots) - 1
        and bool((slots[1:] - slots[:-1] == 1).all())
    )


def _make_bucket(segs: list[Segment], heads: int, slots: int, dtype: torch.dtype, device: torch.device) -> _Bucket:
    longest = len(segs[-1].past_slots)
    rows = torch.tensor([s.q_row for s in segs], device=device)
    if len(segs) == 1 and _is_run(segs[0]):
        seen = segs[0].mask(0, 1, segs[0].past_positions)
        mask = _additive(seen, dtype)
        run = (int(segs[0].past_slots[0]), longest)
        return _Bucket(rows, None, run, (1, heads, longest), None if mask is None else mask.to(device))
    # Padding repeats a row of the same request: it is masked, and its content is finite.
    index = torch.stack([torch.cat([s.past_slots, s.past_slots[:1].expand(longest - len(s.past_slots))]) for s in segs])
    seen = torch.zeros(len(segs), longest, dtype=torch.bool)
    for i, seg in enumerate(segs):
        seen[i, : len(seg.past_slots)] = seg.mask(0, 1, seg.past_positions)[0]
    flat = index[:, None, :] + torch.arange(heads)[:, None] * slots
    mask = _additive(seen[:, None, None, :], dtype)
    return _Bucket(
        rows,
        flat.flatten().to(device),
        (0, 0),
        (len(segs), heads, longest),
        None if mask is None else mask.to(device),
    )


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """A bool mask as numbers to add: [..., L], leading dimensions added up to four; None: all seen."""
    if bool(seen.all()):
        return None
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)
    return mask.view((1,) * (4 - mask.dim()) + mask.shape)


def _attend_block(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: _Block, how: _How
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries q [count, H, G, D] of one block: out [count, H, G, Dv] and lse [count, H, G]."""
    count, heads, folded, dim = q.shape
    rows = q.permute(1, 2, 0, 3).reshape(1, heads, folded * count, dim)
    parts = [how.attend(rows, _columns(keys, p.ranges), _columns(values, p.ranges), p.mask) for p in block.parts]
    out, lse = _merge(parts)
    return out.view(heads, folded, count, -1).permute(2, 0, 1, 3), lse.view(heads, folded, count).permute(2, 0, 1)


def _columns(x: torch.Tensor, ranges: tuple[tuple[int, int], ...]) -> torch.Tensor:
    if len(ranges) == 1:
        return x[:, :, ranges[0][0] : ranges[0][1]]
    return torch.cat([x[:, :, a:b] for a, b in ranges], 2)


def _merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over disjoint keys, joined by log-sum-exp."""
    if len(parts) == 1:
        return parts[0]
    (a, la), (b, lb) = parts
    total = torch.logaddexp(la, lb)
    return a * torch.exp(la - total).unsqueeze(-1) + b * torch.exp(lb - total).unsqueeze(-1), total


@dataclass(frozen=True, slots=True)
class _Part:
    ranges: tuple[tuple[int, int], ...]
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Block:
    first: int
    count: int
    parts: tuple[_Part, ...]


def _blocks(batch: PagedBatch, seg: Segment, folded: int, dtype: torch.dtype, device: torch.device) -> list[_Block]:
    """Query blocks of a segment with the key columns each needs; made once per batch."""
    key = ("blocks", seg.q_row)
    if key not in batch.cache:
        positions = torch.cat([seg.past_positions, torch.arange(seg.kv_start, seg.kv_start + seg.kv_count)])
        step = min(max(_BLOCK_ROWS // folded, 32), _BLOCK_ROWS)
        batch.cache[key] = [
            _make_block(seg, positions, a, min(step, seg.q_count - a), folded, dtype, device)
            for a in range(0, seg.q_count, step)
        ]
    return batch.cache[key]


def _make_block(
    seg: Segment,
    positions: torch.Tensor,
    first: int,
    count: int,
    folded: int,
    dtype: torch.dtype,
    device: torch.device,
) -> _Block:
    def column(position: int) -> int:
        return int(torch.searchsorted(positions, position))

    firsts, lasts = seg.bounds(first, count)
    low, high = column(int(firsts.min())), column(int(lasts.max()) + 1)
    sinks = min(column(seg.bound.sinks), low)
    # Every query of the block sees [inner_low, inner_high).
    inner_low, inner_high = column(int(firsts.max())), column(seg.q_start + first)

    def part(*ranges: tuple[int, int], masked: bool = True) -> _Part:
        ranges = tuple((a, b) for a, b in ranges if b > a)
        mask = None
        if masked:
            seen = seg.mask(first, count, torch.cat([positions[a:b] for a, b in ranges]))
            mask = _additive(seen.repeat(folded, 1), dtype)
        return _Part(ranges, None if mask is None else mask.to(device))

    if inner_high - inner_low >= _MASK_FREE_KEYS:
        free = part((inner_low, inner_high), masked=False)
        return _Block(first, count, (free, part((0, sinks), (low, inner_low), (inner_high, high))))
    return _Block(first, count, (part((0, sinks), (low, high)),))
