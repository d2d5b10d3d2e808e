"""Memory, precision, context and requests: any three give the fourth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from sash.planner.capacity import MAX_CONTEXT, WEIGHT_BYTES, Layout, Precision, prompt_of, weight_bytes
from sash.planner.shapes import Shapes
from sash.spec.config import DEFAULT_CONTEXT
from sash.spec.errors import ConfigError
from sash.spec.footprint import KV_BYTES

Quantity = Literal["memory", "precision", "context", "requests", "check"]

# What is tried, widest first, where the precision is asked for.
WEIGHTS = ("bfloat16", "int8", "int4")
ROWS = ("bfloat16", "int8")
DEFAULT_ANSWER = 512
DEFAULT_RESERVE = 0.1
# A context shorter than a part of this of what was asked is no help, unless nothing else is.
_SHORTEST = 16


@dataclass(frozen=True, slots=True)
class Question:
    """What is known; None is open.

    Args:
        memory_bytes: of the device: weights, pools and the reserve.
        kv_bytes: of the pools alone; given instead of ``memory_bytes``.
        reserve: share of the memory, or bytes where it is 1 or more, that activations and everything else may take.
        weights, kv, window_kv: see ``Precision``.
        context: tokens of one request, prompt and answer.
        requests: that run at once.
        answer: tokens of the context that are generated (half of it at most).
        page_size: tokens in a page.
    """

    memory_bytes: int | None = None
    kv_bytes: int | None = None
    reserve: float = DEFAULT_RESERVE
    weights: str | None = None
    kv: str | None = None
    window_kv: str | None = None
    context: int | None = None
    requests: int | None = None
    answer: int = DEFAULT_ANSWER
    page_size: int = 16


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything known. ``solved`` is what was asked for, or check where all was given. ``kv_bytes`` is the budget of
    the pools, ``needed_bytes`` what ``requests`` of ``context`` tokens need of it, and ``memory_bytes`` the device's
    (None: only the pools are spoken of)."""

    solved: Quantity
    fits: bool
    layout: Layout
    context: int
    prompt: int
    requests: int
    kv_bytes: int
    needed_bytes: int
    weight_bytes: int | None
    memory_bytes: int | None
    reserve_bytes: int

    @property
    def shapes(self) -> Shapes:
        """The model."""
        return self.layout.shapes

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages of each pool at the automatic split; none where not even one request fits."""
        context = max(self.context, 1)
        if self.kv_bytes < self.layout.request_bytes(context):
            return (0,) * len(self.shapes.groups)
        return self.layout.pools(context, max(self.requests, 1), self.kv_bytes)

    @property
    def beyond(self) -> int:
        """Tokens of the context past the longest that the model was made for; 0 where that is unknown."""
        return max(self.context - self.shapes.max_position, 0) if self.shapes.max_position else 0


def solve(shapes: Shapes, question: Question) -> Answer:
    """Find what is open; with less than three known, context is the smaller of the model's and 32 768, and one
    request is planned for.

    Raises:
        ConfigError: the weights' bytes are needed and unknown, or something is out of range.
    """
    _check(shapes, question)
    limited = question.memory_bytes is not None or question.kv_bytes is not None
    if not limited:
        return _memory(shapes, question)
    if question.context is not None and question.requests is not None:
        weights = (question.weights,) if question.weights else WEIGHTS if question.kv_bytes is None else ("bfloat16",)
        return _precision(shapes, question, weights, (question.kv,) if question.kv else ROWS)
    if question.context is None and question.requests is not None:
        return _context(shapes, question)
    return _requests(shapes, question)


def instead(answer: Answer, question: Question) -> tuple[Answer, ...]:
    """For an answer that doesn't fit: what would, with one of precision, memory, context and requests changed. Where
    nothing but more memory helps, also what would with the narrowest precision."""
    if answer.fits:
        return ()
    shapes, precision = answer.shapes, answer.layout.precision
    asked = replace(
        question,
        weights=precision.weights,
        kv=precision.kv,
        context=answer.context or question.context or default_context(shapes),
        requests=max(answer.requests, 1),
    )
    found = _narrower(shapes, asked)
    ways = [found] if found.fits else []
    ways += _others(shapes, asked)
    if len(ways) == 1:
        narrowest = replace(asked, weights=found.layout.precision.weights, kv=found.layout.precision.kv)
        ways += _others(shapes, narrowest)
        if all(way.solved == "memory" for way in ways):
            shorter = _context(shapes, replace(narrowest, context=None))
            ways += [shorter] if shorter.fits else []
    return tuple({(way.solved, way.layout.precision): way for way in ways}.values())


def _narrower(shapes: Shapes, asked: Question) -> Answer:
    """The widest precision that fits among those narrower than asked; the narrowest, where none does."""
    assert asked.weights is not None and asked.kv is not None
    weights, rows = WEIGHT_BYTES[asked.weights], KV_BYTES[asked.kv]
    return _precision(
        shapes,
        replace(asked, weights=None, kv=None),
        # Pools don't depend on weights.
        (asked.weights, *(w for w in WEIGHTS if WEIGHT_BYTES[w] < weights and asked.kv_bytes is None)),
        (asked.kv, *(r for r in ROWS if KV_BYTES[r] < rows)),
    )


def _others(shapes: Shapes, asked: Question) -> list[Answer]:
    """More memory, and where that helps a shorter context or fewer requests."""
    assert asked.context is not None
    shorter, fewer = _context(shapes, replace(asked, context=None)), _requests(shapes, replace(asked, requests=None))
    useful = shorter.fits and shorter.context * _SHORTEST >= asked.context
    return [_memory(shapes, asked), *([shorter] if useful else []), *([fewer] if fewer.fits else [])]


def default_context(shapes: Shapes) -> int:
    """The model's longest, at most 32 768."""
    return min(shapes.max_position or DEFAULT_CONTEXT, DEFAULT_CONTEXT)


def _check(shapes: Shapes, question: Question) -> None:
    if question.memory_bytes is not None and question.kv_bytes is not None:
        raise ConfigError("--memory and --kv-memory both limit the pools: give one of them")
    if question.memory_bytes is not None and shapes.weights is None:
        raise ConfigError(
            f"--memory counts weights, and those of {shapes.name} are not known: give --params (such as 7B), "
            "or --kv-memory for the pools alone"
        )
    for name, value in (("--context", question.context), ("--concurrency", question.requests)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    for name, value in (("--concurrency", question.requests), ("--page-size", question.page_size)):
        if value is not None and value > MAX_CONTEXT:
            raise ConfigError(f"{name} must be at most {MAX_CONTEXT}, got more")
    if question.page_size < 1:
        raise ConfigError(f"--page-size must be at least 1, got {question.page_size}; the default is 16")
    if question.answer < 1:
        raise ConfigError(f"--answer must be at least 1 token, got {question.answer}; the default is {DEFAULT_ANSWER}")


def _precision_of(question: Question) -> Precision:
    return Precision(question.weights or "bfloat16", question.kv or "bfloat16", question.window_kv)


def _layout(shapes: Shapes, question: Question, precision: Precision) -> Layout:
    return Layout(shapes, precision, question.page_size)


def _budget(shapes: Shapes, question: Question, precision: Precision) -> int:
    """Bytes that the pools may take; below 0 where the weights alone are too large."""
    if question.kv_bytes is not None:
        return question.kv_bytes
    assert question.memory_bytes is not None and shapes.weights is not None
    reserve = _reserve(question, question.memory_bytes)
    return question.memory_bytes - reserve - weight_bytes(shapes.weights, precision.weights)


def _reserve(question: Question, memory: int) -> int:
    return int(question.reserve * memory) if question.reserve < 1 else int(question.reserve)


def _answer(question: Question, solved: Quantity, layout: Layout, context: int, requests: int) -> Answer:
    """The answer under a limit, whether it fits or not."""
    shapes, budget = layout.shapes, _budget(layout.shapes, question, layout.precision)
    prompt = prompt_of(context, question.answer)
    return Answer(
        solved=solved,
        fits=requests > 0 and context > 0 and layout.runs(context, prompt, requests, max(budget, 0)),
        layout=layout,
        context=context,
        prompt=prompt,
        requests=requests,
        kv_bytes=max(budget, 0),
        needed_bytes=layout.needed_bytes(max(context, 1), prompt, max(requests, 1)),
        weight_bytes=weight_bytes(shapes.weights, layout.precision.weights) if shapes.weights else None,
        memory_bytes=question.memory_bytes,
        reserve_bytes=0 if question.memory_bytes is None else _reserve(question, question.memory_bytes),
    )


def _memory(shapes: Shapes, question: Question) -> Answer:
    precision = _precision_of(question)
    layout = _layout(shapes, question, precision)
    context, requests = question.context or default_context(shapes), question.requests or 1
    need = layout.needed_bytes(context, prompt_of(context, question.answer), requests)
    found = _answer(replace(question, kv_bytes=need), "memory", layout, context, requests)
    if shapes.weights is None or question.kv_bytes is not None:
        return found
    used = need + weight_bytes(shapes.weights, precision.weights)
    share = question.reserve < 1
    total = -int(-used // (1 - question.reserve)) if share else used + int(question.reserve)
    return replace(found, memory_bytes=total, reserve_bytes=total - used)


def _precision(shapes: Shapes, question: Question, weights: Sequence[str], rows: Sequence[str]) -> Answer:
    """The first precision that fits, of these; where none does, the last, which says how much is missing."""
    assert question.context is not None and question.requests is not None
    answer = None
    for kind, row in product(weights, rows):
        # Rows are narrowed before weights: that changes answers least.
        layout = _layout(shapes, question, Precision(kind, row, question.window_kv))
        solved: Quantity = "check" if len(weights) * len(rows) == 1 else "precision"
        answer = _answer(question, solved, layout, question.context, question.requests)
        if answer.fits:
            break
    assert answer is not None
    return answer


def _requests(shapes: Shapes, question: Question) -> Answer:
    precision = _precision_of(question)
    layout = _layout(shapes, question, precision)
    context = question.context or default_context(shapes)
    budget = _budget(shapes, question, precision)
    prompt = prompt_of(context, question.answer)
    requests = layout.most_requests(context, prompt, budget) if budget > 0 else 0
    return _answer(question, "requests", layout, context, requests)


def _context(shapes: Shapes, question: Question) -> Answer:
    precision = _precision_of(question)
    layout = _layout(shapes, question, precision)
    requests = question.requests or 1
    budget = _budget(shapes, question, precision)
    limit = shapes.max_position or MAX_CONTEXT
    context = layout.longest_context(requests, budget, limit, question.answer) if budget > 0 else 0
    return _answer(question, "context", layout, context, requests)
