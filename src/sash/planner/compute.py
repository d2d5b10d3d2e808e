"""Operations: what attention costs beside the linear layers, per token and for a whole prompt.

One multiplication with its addition counts as two operations. A pair of a query and a key costs a product over the head
for the logit and one for the value, in each query head.
"""

from __future__ import annotations

from collections.abc import Callable

from sash.planner.capacity import largest
from sash.planner.shapes import Shapes
from sash.spec.errors import ConfigError
from sash.spec.span import Span, SpanKind

# Contexts beyond this are not looked at.
_FAR = 1 << 32


def attention_flop(shapes: Shapes, position: int, prompt: int) -> int:
    """Operations of attention for the query at ``position`` of a request with a prompt of ``prompt`` tokens; in chunked
    layers, where it swings, the most."""
    return sum(k.count * k.pair_flop * _visible(k.span, position, prompt) for k in shapes.kinds)


def _visible(span: Span, position: int, prompt: int) -> int:
    if span.kind is SpanKind.CHUNKED:
        return min(position + 1, span.window)
    return span.bind(prompt).num_visible(position)


def attention_total_flop(shapes: Shapes, tokens: int, prompt: int) -> int:
    """Operations of attention for all ``tokens`` tokens of a request, of which ``prompt`` are the prompt."""
    return sum(k.count * k.pair_flop * k.span.bind(prompt).num_pairs(tokens) for k in shapes.kinds)


def attention_prompt_flop(shapes: Shapes, tokens: int) -> int:
    """Operations of attention for a prompt of ``tokens`` tokens."""
    return attention_total_flop(shapes, tokens, tokens)


def linear_flop(shapes: Shapes) -> int:
    """Operations of everything else for one token, the usual way: 2 × all weights (of experts those that are used).

    Raises:
        ConfigError: the weights are unknown.
    """
    if shapes.weights is None:
        raise ConfigError(f"the weights of {shapes.name} are not known: give --params, such as 7B")
    return 2 * (shapes.weights.active + shapes.weights.embed)


def crossover_token(shapes: Shapes) -> int | None:
    """The context at which attention for one more token costs as much as the linear layers; None: never."""
    linear = linear_flop(shapes)
    return _first(lambda n: attention_flop(shapes, n - 1, n) >= linear)


def crossover_prompt(shapes: Shapes) -> int | None:
    """The prompt whose attention costs as much as its linear layers; None: none does."""
    linear = linear_flop(shapes)
    return _first(lambda n: attention_prompt_flop(shapes, n) >= n * linear)


def _first(reached: Callable[[int], bool]) -> int | None:
    if not reached(_FAR):
        return None
    return largest(lambda n: not reached(n), 0, _FAR) + 1
