"""Attention calls over pages, as a runner would make them: NaN in every slot that nothing lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from sash.kv.storage import KVRows, Planes, quantise
from sash.ops import native
from sash.ops.attention_reference import dense_attention
from sash.ops.paged import PagedBatch, Segment
from sash.spec.span import BoundSpan

# Of output and log-sum-exp against float32 on the same inputs; bfloat16 rounds weights and result to 8 bits.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Part:
    """One request in a step. Keys from ``kv_start`` on are in hand, those before it in the pool;
    ``hand`` False: all are. ``extra`` more rows than the window needs are listed."""

    bound: BoundSpan
    kv_start: int
    q_start: int
    end: int
    hand: bool = True
    extra: int = 0
    run: bool = False

    def past(self) -> torch.Tensor:
        """Positions of the keys in the pool."""
        stop = self.kv_start if self.hand else self.end
        first = self.bound.first(min(self.q_start, self.end - 1))
        first = max(0, min(first, stop) - self.extra)
        return torch.cat([torch.arange(min(self.bound.sinks, first)), torch.arange(first, stop)])


@dataclass
class Call:
    """Arguments of an attention op."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    batch: PagedBatch
    scale: float
    softcap: float = 0.0
    sink_logits: torch.Tensor | None = None
    # Of rows in hand [N, H] and in the pool [H, slots], where those are int8.
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    k_pool_scale: torch.Tensor | None = None
    v_pool_scale: torch.Tensor | None = None

    def run(self, attention: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp of an op."""
        return attention(
            self.q,
            KVRows(self.k, self.v, self.k_scale, self.v_scale),
            Planes(self.k_pool, self.v_pool, self.k_pool_scale, self.v_pool_scale),
            self.batch,
            scale=self.scale,
            softcap=self.softcap,
            sink_logits=self.sink_logits,
        )


def rows(request: int, positions: torch.Tensor, heads: int, dim: int, what: int) -> torch.Tensor:
    """Random [n, heads, dim] that depends on request and position alone, wherever the rows are kept."""
    if not len(positions):
        return torch.zeros(0, heads, dim)
    generator = torch.Generator().manual_seed(1000 * request + what)
    return torch.randn(int(positions.max()) + 1, heads, dim, generator=generator)[positions]


def _page_order(parts: Sequence[Part], counts: Sequence[int]) -> torch.Tensor:
    """A page for every page index of every part, shuffled over all parts but those that run in order."""
    order = torch.arange(sum(counts))
    loose = torch.cat([torch.full((n,), not part.run) for part, n in zip(parts, counts, strict=True)])
    shuffled = torch.randperm(int(loose.sum()), generator=torch.Generator().manual_seed(7))
    order[loose] = order[loose][shuffled]
    return order


@dataclass(frozen=True)
class Shape:
    """KV heads, query heads per KV head, head sizes, type, page, and the type of K and V (None: the same) of a call."""

    heads: int = 2
    folded: int = 2
    dim: int = 8
    v_dim: int | None = None
    dtype: torch.dtype = torch.float32
    page: int = 4
    stored: torch.dtype | None = None


def _store(want: Shape, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows [n, heads, dim] as they are stored, and their scales [n, heads]."""
    if want.stored == torch.int8:
        return quantise(rows.to(want.dtype))
    return rows.to(want.dtype).to(want.stored or want.dtype), None


def _pool(want: Shape, slots: int, dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A plane and its scales, in which everything is poison."""
    if want.stored == torch.int8:
        poison = torch.full((want.heads, slots, dim), -1, dtype=torch.int8)
        return poison, torch.full((want.heads, slots), math.nan)
    return torch.full((want.heads, slots, dim), math.nan, dtype=want.stored or want.dtype), None


def _put(plane: torch.Tensor | None, slots: torch.Tensor, rows: torch.Tensor | None) -> None:
    if plane is not None and rows is not None:
        plane[:, slots] = rows.transpose(0, 1)


def make_call(
    parts: Sequence[Part],
    *,
    names: Sequence[int] | None = None,
    softcap: float = 0.0,
    sink_logits: torch.Tensor | None = None,
    **shape: Any,
) -> Call:
    """A call for ``parts``, of a ``Shape``; ``names`` are the requests' numbers, which decide their random values."""
    want = Shape(**shape)
    heads, folded, dim, dtype, page = want.heads, want.folded, want.dim, want.dtype, want.page
    v_dim = dim if want.v_dim is None else want.v_dim
    names = range(len(parts)) if names is None else names
    counts = [-(-part.end // page) + 2 for part in parts]
    pages = sum(counts)
    order = _page_order(parts, counts)
    (k_pool, k_pool_scale), (v_pool, v_pool_scale) = (_pool(want, pages * page, n) for n in (dim, v_dim))
    qs, segments = [], []
    hands: list[list[torch.Tensor]] = [[], [], [], []]
    q_row = kv_row = taken = 0
    for name, part in zip(names, parts, strict=True):
        past, hand = part.past(), torch.arange(part.kv_start, part.end if part.hand else part.kv_start)
        queries = torch.arange(part.q_start, part.end)
        slots = order[taken + past // page] * page + past % page
        taken += counts[len(segments)]
        every = torch.cat([past, hand])
        keys, k_scale = _store(want, rows(name, every, heads, dim, 1))
        values, v_scale = _store(want, rows(name, every, heads, v_dim, 2))
        parts_of = zip((k_pool, v_pool, k_pool_scale, v_pool_scale), (keys, values, k_scale, v_scale), strict=True)
        for i, (plane, own) in enumerate(parts_of):
            if own is not None:
                _put(plane, slots, own[: len(past)])
                hands[i].append(own[len(past) :])
        qs.append(rows(name, queries, heads * folded, dim, 3).to(dtype))
        kv_start = part.kv_start if part.hand else part.end
        segments.append(
            Segment(part.bound, q_row, part.q_start, len(queries), kv_row, kv_start, len(hand), past, slots)
        )
        q_row, kv_row = q_row + len(queries), kv_row + len(hand)
    k, v, k_scale, v_scale = (torch.cat(own) if own else None for own in hands)
    assert k is not None and v is not None
    return Call(
        torch.cat(qs),
        k,
        v,
        k_pool,
        v_pool,
        PagedBatch(tuple(segments)),
        1.7 / dim**0.5,
        softcap,
        sink_logits,
        k_scale,
        v_scale,
        k_pool_scale,
        v_pool_scale,
    )


@lru_cache
def _visible(bound: BoundSpan, queries: range, keys: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([[bound.visible(q, k) for k in keys] for q in queries])


def dense(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by one masked product per segment, in float32; the mask asks ``visible`` for each pair, and what is
    stored as int8 is multiplied out first."""
    if call.k_scale is not None:
        planes = ("k", "v", "k_pool", "v_pool")
        numbers = {name: getattr(call, name).float() * getattr(call, f"{name}_scale")[..., None] for name in planes}
        call = replace(call, **numbers)
    heads = call.k_pool.shape[0]
    folded = call.q.shape[1] // heads
    out = torch.zeros(call.q.shape[0], call.q.shape[1], call.v.shape[2])
    lse = torch.zeros(out.shape[:2])
    for seg in call.batch.segments:
        hand = slice(seg.kv_row, seg.kv_row + seg.kv_count)
        keys = torch.cat([call.k_pool[:, seg.past_slots], call.k[hand].transpose(0, 1)], 1)
        values = torch.cat([call.v_pool[:, seg.past_slots], call.v[hand].transpose(0, 1)], 1)
        positions = [*seg.past_positions.tolist(), *range(seg.kv_start, seg.kv_start + seg.kv_count)]
        if not seg.q_count:
            continue
        mask = _visible(seg.bound, range(seg.q_start, seg.q_start + seg.q_count), tuple(positions))
        queries = slice(seg.q_row, seg.q_row + seg.q_count)
        got, total = dense_attention(
            call.q[queries].transpose(0, 1),
            keys.repeat_interleave(folded, 0),
            values.repeat_interleave(folded, 0),
            mask,
            scale=call.scale,
            softcap=call.softcap,
        )
        if call.sink_logits is not None:
            got = got * torch.sigmoid(total - call.sink_logits[:, None].float()).unsqueeze(-1)
        out[queries], lse[queries] = got.transpose(0, 1), total.T
    return out.to(call.q.dtype), lse


def assert_close(
    got: tuple[torch.Tensor, torch.Tensor | None], wanted: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> None:
    """Outputs and log-sum-exps agree, and nothing is NaN."""
    for a, b in zip(got, wanted, strict=True):
        assert a is not None and a.dtype == b.dtype and a.shape == b.shape
        assert bool(torch.isfinite(a).all())
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def native_versions() -> dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]]:
    """The C++ kernel on every instruction set that this processor has; empty where it isn't built."""
    module, best = native.load()
    if module is None:
        return {}

    def on(isa: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        def attention(*args: Any, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
            module.set_isa(isa)
            try:
                return native.attention(*args, **how)
            finally:
                module.set_isa(best)

        return attention

    return {f"native {isa}": on(isa) for isa in native.ISAS[native.ISAS.index(best) :]}
