"""EngineReport: the engine at one moment, in numbers; what stats, metrics and the live page are made of."""

from __future__ import annotations

import msgspec


class PoolReport(msgspec.Struct, frozen=True):
    """One KV pool.

    Args:
        name: window, full … (``sash.spec.groups``).
        span: what its layers see, in words.
        layers: how many share it.
        dtype: of K and V.
        page_size: tokens in a page.
        page_bytes: bytes of a page over all layers.
        num_pages: of them ``free_pages`` are free (promised ones included), ``held_pages`` are referenced by running
            requests and ``cached_pages`` only by kept prefixes.
        promised_pages: set aside for running requests.
        peak_pages: most ever held.
        longest_pages: what one request of ``max_model_len`` holds at most.
        slid_pages: pages that a window has moved past and whose memory was taken over, since the start.
        written_rows: K and V rows stored, one per token whatever the number of layers, since the start.
        requests: pages of each running request.
        page_map: what stands in the pool from its first page to its last, as runs (owner, pages, number): an answer
            id, or "" for free ones; ``number`` is which of its owner's pages the run's first one is (position //
            page_size), the others follow it one by one. None unless asked for.
        kind: of the span, see ``sash.spec.span.SpanKind``.
        window: of the span, in tokens; 0 where it has none.
        sinks: of the span, in tokens.
    """

    name: str
    span: str
    layers: int
    dtype: str
    page_size: int
    page_bytes: int
    num_pages: int
    free_pages: int
    held_pages: int
    promised_pages: int
    peak_pages: int
    longest_pages: int
    slid_pages: int
    written_rows: int
    requests: dict[str, int]
    cached_pages: int = 0
    page_map: list[tuple[str, int, int]] | None = None
    kind: str = "full"
    window: int = 0
    sinks: int = 0


class RequestReport(msgspec.Struct, frozen=True):
    """One unfinished answer. ``state`` is waiting, prefill or decode; ``computed_tokens`` of its tokens have K and V
    (the windows hold only the newest of them)."""

    answer_id: str
    state: str
    prompt_tokens: int
    computed_tokens: int
    generated_tokens: int
    max_tokens: int
    preemptions: int


class EngineReport(msgspec.Struct, frozen=True):
    """Counters since the start, and the state now.

    ``waiting_for`` says what the first waiting answer lacks: seats (``max_num_seqs`` run), pages, or turn (a step
    hasn't come to it yet), and counts all that wait behind it under the same word. ``prompt_tokens`` counts the
    prompts' rows that were computed, after a preemption once more; ``generation_tokens`` what was drawn.
    ``uniform_bytes`` is what one cache without windows would hold now, ``uniform_peak_bytes`` at its peak.
    ``step_tokens`` counts steps by the tokens that they computed, rounded up to powers of two; ``computed_tokens`` is
    their sum, not rounded. ``busy_s`` is the time spent in steps.
    """

    pools: list[PoolReport]
    requests: list[RequestReport]
    max_model_len: int
    max_num_seqs: int
    running: int
    waiting: int
    waiting_for: dict[str, int]
    steps: int
    failed_steps: int
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    draft_tokens: int
    accepted_tokens: int
    uniform_peak_bytes: int
    busy_s: float
    step_tokens: dict[int, int]
    computed_tokens: int = 0
    uniform_bytes: int = 0
