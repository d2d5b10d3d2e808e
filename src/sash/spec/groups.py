"""KV groups: layers that share a page table because their spans and row shapes are equal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sash.spec.model import ModelSpec
from sash.spec.span import Span, SpanKind

_NAMES = {
    SpanKind.FULL: "full",
    SpanKind.SLIDING: "window",
    SpanKind.CHUNKED: "chunk",
    SpanKind.REFERENCE: "reference",
    SpanKind.PREFILL_WINDOW: "full-decode",
}


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers with equal span, KV heads and head sizes; they share one pool and one page table.

    ``name`` is unique in the model: full, window, chunk …, a second of a kind gets ``-2``.
    """

    name: str
    span: Span
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    @property
    def bounded(self) -> bool:
        """Whether the group's rows stop growing with a request's length."""
        return self.span.bounded


def group_layers(spec: ModelSpec) -> tuple[GroupSpec, ...]:
    """The groups of a model, in order of their first layer."""
    return group_rows((layer.span, layer.num_kv_heads, layer.head_dim, layer.v_head_dim) for layer in spec.layers)


def group_rows(rows: Iterable[tuple[Span, int, int, int]]) -> tuple[GroupSpec, ...]:
    """The groups of layers given as (span, KV heads, size of a key, size of a value), in order of their first layer."""
    members: dict[tuple[Span, int, int, int], list[int]] = {}
    for i, row in enumerate(rows):
        members.setdefault(row, []).append(i)
    groups, seen = [], dict.fromkeys(SpanKind, 0)
    for (span, heads, dim, v_dim), layers in members.items():
        seen[span.kind] += 1
        suffix = f"-{seen[span.kind]}" if seen[span.kind] > 1 else ""
        groups.append(GroupSpec(_NAMES[span.kind] + suffix, span, tuple(layers), heads, dim, v_dim))
    return tuple(groups)
