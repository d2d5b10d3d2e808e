"""The one formula for KV memory: columns of a page table, pages of a request, bytes of a page.

Planner, pools, admission, metrics and benchmarks call these functions; a test holds their answer
equal to the pools' real bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from sash.spec.groups import GroupSpec
from sash.spec.span import BoundSpan, SpanKind

# Bytes of one stored element of K and V. A row of int8 has a float32 scale in each head, for K and for V.
KV_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
SCALE_BYTES = 4


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up, for a of 0 or more."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class TableShape:
    """Geometry of one request's page table in one group.

    Page i (positions i·page_size …) sits in column i while i < ``pin``, else in column
    ``pin + (i - pin) % ring``. ``slack`` is the number of rows kept below the window, so that a
    step back is free. A table that never wraps is the case pin + ring = all pages.
    """

    page_size: int
    pin: int
    ring: int
    slack: int

    def column(self, page_index: int) -> int:
        """Column of page ``page_index``."""
        return page_index if page_index < self.pin else self.pin + (page_index - self.pin) % self.ring

    def pages(self, tokens: int) -> int:
        """Most pages that a request of ``tokens`` tokens holds at any time."""
        return min(self.pin + self.ring, ceil_div(tokens, self.page_size))


def table_shape(
    bound: BoundSpan, page_size: int, max_model_len: int, *, slack: int = 0, hybrid_ratio: float = 1.0
) -> TableShape:
    """The table of a request with this span.

    Args:
        bound: the span, bound to the request.
        page_size: tokens in a page.
        max_model_len: longest request, in tokens.
        slack: rows to keep below the window.
        hybrid_ratio: 1 gives the ring, 0 a table of full length, between them is interpolated.
    """
    whole = ceil_div(max_model_len, page_size)
    pin = min(ceil_div(bound.sinks, page_size), whole)
    rest = max(whole - pin, 1)
    if not bound.span.bounded:
        return TableShape(page_size, 0, max(whole, 1), max_model_len)
    window = bound.span.window
    if bound.span.kind is SpanKind.CHUNKED and slack == 0 and window % page_size == 0:
        ring = window // page_size
    else:
        ring = ceil_div(window - 1 + slack, page_size) + 1
    ring = min(ring, rest)
    # Beyond 2^53 pages the product is rounded, and would lose the ring.
    wider = max(round(rest + hybrid_ratio * (ring - rest)), ring)
    return TableShape(page_size, pin, wider, slack + (wider - ring) * page_size)


def row_bytes(group: GroupSpec, dtype: str) -> int:
    """Bytes of one token's K and V in all layers of the group, stored as ``dtype`` of KV_BYTES."""
    scales = 2 * SCALE_BYTES if dtype == "int8" else 0
    row = (group.head_dim + group.v_head_dim) * KV_BYTES[dtype] + scales
    return len(group.layers) * group.num_kv_heads * row


def page_bytes(group: GroupSpec, page_size: int, dtype: str) -> int:
    """Bytes of one page in all layers of the group."""
    return page_size * row_bytes(group, dtype)


def uniform_bytes(groups: tuple[GroupSpec, ...], tokens: int, page_size: int, dtypes: tuple[str, ...]) -> int:
    """Bytes that one cache without windows would take for ``tokens`` tokens, in whole pages."""
    pages = zip(groups, dtypes, strict=True)
    return ceil_div(tokens, page_size) * sum(page_bytes(group, page_size, dtype) for group, dtype in pages)
