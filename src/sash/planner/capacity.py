"""What fits: bytes of weights and of requests, pools, requests at once, longest context. All by the engine's formulas.

A context of n tokens is a request of n tokens, prompt and answer together (``max_model_len``). The row of its last
token is never stored, so n - 1 rows decide what it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from sash.planner.shapes import Shapes, WeightCount
from sash.spec import sizing
from sash.spec.footprint import row_bytes, table_shape, uniform_bytes
from sash.spec.groups import GroupSpec
from sash.spec.span import SpanKind

# int4: half a byte, and two numbers of two bytes for every 32 weights.
WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.625}
# The copy of an int8 head's upper six bits, which greedy tokens are found in.
_SIX_BITS = 0.75
# Longest context that is looked for where the model names none.
MAX_CONTEXT = 1 << 40


@dataclass(frozen=True, slots=True)
class Precision:
    """What weights (a key of ``WEIGHT_BYTES``) and K and V (of ``sash.spec.footprint.KV_BYTES``) are stored as;
    ``window_kv`` is for bounded groups alone, None: as ``kv``."""

    weights: str = "bfloat16"
    kv: str = "bfloat16"
    window_kv: str | None = None

    def of(self, group: GroupSpec) -> str:
        """What a group's rows are stored as."""
        return self.kv if self.window_kv is None or not group.bounded else self.window_kv

    def describe(self) -> str:
        """``int8 weights, bfloat16 KV``."""
        window = f", {self.window_kv} in windows" if self.window_kv not in (None, self.kv) else ""
        return f"{self.weights} weights, {self.kv} KV{window}"


def weight_bytes(count: WeightCount, kind: str) -> int:
    """Bytes of a model's weights as sash keeps them.

    int8 and int4: the head is int8 and has a copy of six of its bits; an embedding of its own stays bfloat16.
    Scales (below one in a hundred) are left out.
    """
    each = WEIGHT_BYTES[kind]
    layers = each * (count.dense + count.experts)
    if kind not in ("int8", "int4"):
        return int(layers + each * (count.head + count.embed))
    return int(layers + (WEIGHT_BYTES["int8"] + _SIX_BITS) * count.head + WEIGHT_BYTES["bfloat16"] * count.embed)


@dataclass(frozen=True)
class Layout:
    """How a model's rows are stored."""

    shapes: Shapes
    precision: Precision = Precision()
    page_size: int = 16

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """What each group's rows are stored as."""
        return tuple(self.precision.of(group) for group in self.shapes.groups)

    @cached_property
    def token_bytes(self) -> dict[str, int]:
        """Bytes of one token by group."""
        groups = self.shapes.groups
        return {g.name: row_bytes(g, dtype) for g, dtype in zip(groups, self.dtypes, strict=True)}

    def demand(self, context: int, requests: int) -> sizing.Demand:
        """What the engine would size its pools for, with max_model_len and max_num_seqs of these."""
        return sizing.Demand(
            groups=self.shapes.groups,
            dtypes=self.dtypes,
            page_size=self.page_size,
            max_model_len=context,
            max_num_seqs=requests,
        )

    def request_bytes(self, context: int) -> int:
        """Bytes of the pages that the engine sets aside for one request of ``context`` tokens."""
        return self.demand(context, 1).request_bytes()

    def uniform_bytes(self, context: int) -> int:
        """Bytes that one cache without windows would take for it."""
        return uniform_bytes(self.shapes.groups, context, self.page_size, self.dtypes)

    def held_pages(self, context: int, prompt: int) -> tuple[int, ...]:
        """Pages per group that a request whose prompt has ``prompt`` of its tokens holds at its end."""
        rows = max(context - 1, 1)
        bounds = (group.span.bind(prompt) for group in self.shapes.groups)
        return tuple(table_shape(b, self.page_size, context).pages(rows) for b in bounds)

    def held_bytes(self, context: int, prompt: int) -> int:
        """Bytes of ``held_pages``."""
        pages = self.demand(context, 1).page_bytes()
        return sum(n * b for n, b in zip(self.held_pages(context, prompt), pages, strict=True))

    def pools(self, context: int, requests: int, kv_bytes: int) -> tuple[int, ...]:
        """Pages of each pool at the engine's automatic split."""
        return sizing.auto_split(self.demand(context, requests), kv_bytes)

    def ratio_pools(self, context: int, requests: int, kv_bytes: int, ratio: float) -> tuple[int, ...]:
        """Pages of each pool where window tokens are ``ratio`` times full tokens (``swa_full_tokens_ratio``)."""
        return sizing.ratio_split(self.demand(context, requests), kv_bytes, ratio, None)

    def fitting(self, pages: tuple[int, ...], context: int, prompt: int) -> int:
        """Requests of ``context`` tokens that these pools hold at once to their end."""
        held = self.held_pages(context, prompt)
        return min(have // need for have, need in zip(pages, held, strict=True))

    def runs(self, context: int, prompt: int, requests: int, kv_bytes: int) -> bool:
        """Whether an engine with this budget, this longest request and so many seats runs all of them at once."""
        demand = self.demand(context, requests)
        pages = sizing.auto_split(demand, kv_bytes)
        starts = all(have >= need for have, need in zip(pages, demand.request_pages(), strict=True))
        return starts and self.fitting(pages, context, prompt) >= requests

    def most_requests(self, context: int, prompt: int, kv_bytes: int) -> int:
        """The most requests for which ``runs`` is true; 0: not even one."""
        least = max(kv_bytes // self.request_bytes(context), 0)
        return largest(lambda n: self.runs(context, prompt, n, kv_bytes), least)

    def longest_context(self, requests: int, kv_bytes: int, limit: int, answer: int) -> int:
        """The longest context up to ``limit`` of which ``requests`` run at once; 0: none. Of it ``answer`` tokens, or
        half where that is less, are generated."""
        return largest(lambda n: self.runs(n, prompt_of(n, answer), requests, kv_bytes), 0, limit)

    def needed_bytes(self, context: int, prompt: int, requests: int) -> int:
        """The least budget under which ``requests`` run at once; never less than one of any kind needs."""
        worst, held = self.request_bytes(context), self.held_bytes(context, prompt)
        least = max(worst, requests * held)
        return 1 + largest(lambda n: not self.runs(context, prompt, requests, n), least - 1, requests * worst)

    def row_bytes(self, tokens: int, prompt: int) -> dict[str, int]:
        """Bytes by group of the rows that a query at the end of ``tokens`` tokens sees, not rounded to pages; a chunk
        counts whole."""
        out = {}
        for group, each in zip(self.shapes.groups, self.token_bytes.values(), strict=True):
            bound = group.span.bind(min(prompt, tokens))
            chunked = group.span.kind is SpanKind.CHUNKED
            out[group.name] = each * (min(tokens, group.span.window) if chunked else bound.num_visible(tokens - 1))
        return out


def prompt_of(context: int, answer: int) -> int:
    """Prompt tokens of a request, at least one, at least half."""
    return max(context - min(answer, context // 2), 1)


def largest(holds: Callable[[int], bool], known: int, limit: int = MAX_CONTEXT) -> int:
    """The largest n from ``known`` (taken to hold) to ``limit`` for which ``holds`` is true, where it stays false once
    it is."""
    low, step = min(known, limit), 1
    while low < limit and holds(min(low + step, limit)):
        low, step = min(low + step, limit), 2 * step
    high = min(low + step, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def ring_pages(layout: Layout, context: int) -> int:
    """Pages of a request in bounded groups, the widest of them; 0: none is bounded."""
    pages = layout.demand(context, 1).request_pages()
    return max((n for g, n in zip(layout.shapes.groups, pages, strict=True) if g.bounded), default=0)
