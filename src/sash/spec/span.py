"""The one rule of visibility: which key positions a query position sees.

    visible(q, k)  =  k <= last(q)  and  ( k < sinks  or  k >= first(q) )

Masks, page tables, what may be freed, byte formulas, admission and plots all ask this module;
nobody else computes "is it in the window". A window of W counts the query itself: query q sees
keys q - W + 1 … q. Conventions of other libraries (``window_left = W - 1``) are converted at
the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sash.spec.errors import ConfigError


class SpanKind(StrEnum):
    """How the first visible position follows from the query position."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    REFERENCE = "reference"
    PREFILL_WINDOW = "prefill_window"


@dataclass(frozen=True, slots=True)
class Span:
    """Visibility of one layer, before it is bound to a request.

    Args:
        kind: full; sliding (window, optionally with sinks); chunked (Llama 4: same chunk);
            reference (R-SWA: the prompt stays, generated tokens slide); prefill_window (window
            for prompt queries, everything for generated ones).
        window: W in tokens, the query included; the chunk length for ``chunked``; 0 for ``full``.
        sinks: number of first positions that are always visible (StreamingLLM).

    Raises:
        ConfigError: a window below 1 where one is needed, or sinks on a kind that has none.
    """

    kind: SpanKind = SpanKind.FULL
    window: int = 0
    sinks: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", SpanKind(self.kind))
        if self.kind is SpanKind.FULL:
            if self.window or self.sinks:
                raise ConfigError(
                    f"a full span has no window and no sinks, got window={self.window} sinks={self.sinks}"
                )
        elif self.window < 1:
            raise ConfigError(f"window must be at least 1 (it counts the query itself), got {self.window}")
        if self.sinks < 0 or (self.sinks and self.kind is not SpanKind.SLIDING):
            raise ConfigError(f"sinks must be 0 or more and need a sliding span, got {self.sinks} on {self.kind}")

    @classmethod
    def full(cls) -> Span:
        """Every earlier position is visible."""
        return cls()

    @classmethod
    def sliding(cls, window: int, sinks: int = 0) -> Span:
        """The last ``window`` positions, the query included, and the first ``sinks``."""
        return cls(SpanKind.SLIDING, window, sinks)

    @classmethod
    def chunked(cls, chunk: int) -> Span:
        """Positions of the query's own chunk of ``chunk`` tokens (Llama 4)."""
        return cls(SpanKind.CHUNKED, chunk)

    @property
    def bounded(self) -> bool:
        """Whether the rows that must stay are bounded however long the request gets."""
        return self.kind in (SpanKind.SLIDING, SpanKind.CHUNKED, SpanKind.REFERENCE)

    def bind(self, prompt_tokens: int) -> BoundSpan:
        """The span of one request whose prompt has ``prompt_tokens`` tokens."""
        sinks = prompt_tokens if self.kind is SpanKind.REFERENCE else self.sinks
        return BoundSpan(self, prompt_tokens, sinks)

    def describe(self) -> str:
        """One short phrase for people: ``window 512``, ``full``, ``window 4 + 4 sinks``."""
        match self.kind:
            case SpanKind.FULL:
                return "full"
            case SpanKind.SLIDING:
                return f"window {self.window}" + (f" + {self.sinks} sinks" if self.sinks else "")
            case SpanKind.CHUNKED:
                return f"chunk {self.window}"
            case SpanKind.REFERENCE:
                return f"prompt + window {self.window}"
            case SpanKind.PREFILL_WINDOW:
                return f"window {self.window} in prefill"


@dataclass(frozen=True, slots=True)
class BoundSpan:
    """A span bound to a request: everything about visibility is answered here.

    ``sinks`` are the first positions that never slide: the span's own, or the prompt of a
    reference window.
    """

    span: Span
    prompt_tokens: int
    sinks: int

    def first(self, q: int) -> int:
        """First position, sinks apart, that the query at position ``q`` sees; never below 0."""
        span = self.span
        match span.kind:
            case SpanKind.FULL:
                return 0
            case SpanKind.SLIDING | SpanKind.REFERENCE:
                return max(0, q - span.window + 1)
            case SpanKind.CHUNKED:
                return q // span.window * span.window
            case SpanKind.PREFILL_WINDOW:
                return max(0, q - span.window + 1) if q < self.prompt_tokens else 0

    def first_of(self, start: int, end: int) -> int:
        """First position, sinks apart, that any query in start … end - 1 sees (``start`` below ``end``).

        ``first`` never falls as q grows, except where a prefill window opens at the end of the prompt.
        """
        return min(self.first(start), self.first(end - 1))

    def last(self, q: int) -> int:
        """Last position that the query at ``q`` sees (itself: sash is causal)."""
        return q

    def visible(self, q: int, k: int) -> bool:
        """Whether the query at position ``q`` sees the key at position ``k``."""
        return k <= self.last(q) and (k < self.sinks or k >= self.first(q))

    def num_visible(self, q: int) -> int:
        """How many keys the query at position ``q`` sees, itself included."""
        return self.last(q) + 1 - max(0, self.first(q) - self.sinks)

    def num_pairs(self, tokens: int) -> int:
        """Pairs of a query and a key that it sees, over the first ``tokens`` positions; the sum of ``num_visible``."""
        span, hidden = self.span, 0
        match span.kind:
            case SpanKind.SLIDING | SpanKind.REFERENCE:
                beyond = max(0, tokens - span.window - self.sinks)
                hidden = beyond * (beyond + 1) // 2
            case SpanKind.PREFILL_WINDOW:
                beyond = max(0, min(tokens, self.prompt_tokens) - span.window)
                hidden = beyond * (beyond + 1) // 2
            case SpanKind.CHUNKED:
                chunks, rest = divmod(tokens, span.window)
                hidden = span.window * (span.window * (chunks * (chunks - 1) // 2) + chunks * rest)
        return tokens * (tokens + 1) // 2 - hidden

    def retained_from(self, computed: int) -> int:
        """First position, sinks apart, that any query at ``computed`` or later can see.

        A prefill window opens at the end of the prompt, so there every row is retained.
        """
        if self.span.kind is SpanKind.PREFILL_WINDOW:
            return 0
        return self.first(computed)
