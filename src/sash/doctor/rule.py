"""The rule of visibility once more, written from the papers and apart from ``sash.spec.span``.

A doctor that asked the engine's own class would share its mistakes. Sources: Mistral (arXiv 2310.06825: a window of W
counts the query), StreamingLLM (2309.17453: sinks), Llama 4 (chunks), R-SWA (the prompt stays). Loads no torch.
"""

from __future__ import annotations

from typing import Any

from sash.spec.span import Span, SpanKind


def sees(span: Span, prompt_tokens: int, q: Any, k: Any) -> Any:
    """Whether the query at position ``q`` sees the key at position ``k``: whole numbers, or tensors of them."""
    causal, near = k <= q, q - k < span.window
    match span.kind:
        case SpanKind.FULL:
            return causal
        case SpanKind.SLIDING:
            return causal & (near | (k < span.sinks))
        case SpanKind.CHUNKED:
            return causal & (q // span.window == k // span.window)
        case SpanKind.REFERENCE:
            return causal & (near | (k < prompt_tokens))
        case SpanKind.PREFILL_WINDOW:
            return causal & (near | (q >= prompt_tokens))


def needed(span: Span, prompt_tokens: int, next_q: int, k: int) -> bool:
    """Whether the query at ``next_q`` or any later one sees the key at ``k``."""
    if span.kind is SpanKind.PREFILL_WINDOW:
        return True
    return bool(sees(span, prompt_tokens, max(next_q, k), k))


def most_pages(span: Span, prompt_tokens: int, page_size: int, slack: int) -> int | None:
    """Pages that a request needs in such layers however long it gets; None where that has no bound.

    A window of W rows may begin anywhere in a page, so it touches (W - 1) / page_size + 1 pages, rounded up.
    """
    if not span.bounded:
        return None
    sinks = prompt_tokens if span.kind is SpanKind.REFERENCE else span.sinks
    return _pages(sinks, page_size) + _pages(span.window - 1 + slack, page_size) + 1


def _pages(rows: int, page_size: int) -> int:
    return -(-rows // page_size)
