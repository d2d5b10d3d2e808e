"""The same layers under other rules: full, hybrid, pure, reference window, sparse, linear; and a full cache bounded by
a policy. What each holds, reads and computes, so that they can be compared for one model at one length."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sash.planner.capacity import Layout
from sash.planner.compute import attention_flop, attention_total_flop
from sash.planner.shapes import Shapes
from sash.planner.units import spaced
from sash.spec.span import Span, SpanKind

# A hybrid for models that are none: Gemma 3's, one full layer in six.
HYBRID_WINDOW, HYBRID_EVERY = 1024, 6
REFERENCE_WINDOW = 128
# DeepSeek-V3.2's sparse attention: keys that a query reads, bytes of an index row (128 of FP8 and a scale), operations
# of its 64 index heads of 128 dimensions for one pair.
TOP_KEYS, INDEX_BYTES, INDEX_PAIR_FLOP = 2048, 132, 2 * 64 * 128
MILLION = 1_000_000
# Of a million tokens under a reference window, those of the prompt.
MILLION_PROMPT = 32_768
# A linear layer's state per head is a matrix of key by value, kept in float32.
_STATE_BYTES = 4
SINKS = 4
RECENT = (1024, 4096)


@dataclass(frozen=True, slots=True)
class Cost:
    """One request at one length.

    ``held_bytes`` of K, V and whatever else stays; ``read_bytes`` of it that one more token reads; ``token_flop`` of
    attention for that token and ``total_flop`` for all so far; ``gives`` says what such a model can't do or needs.
    """

    name: str
    rule: str
    held_bytes: int
    read_bytes: int
    token_flop: int
    total_flop: int
    gives: str


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to store the same model's rows. ``request_bytes`` in whole pages; ``exact`` where answers don't change."""

    name: str
    layout: Layout
    exact: bool
    note: str


def hybrid_of(shapes: Shapes) -> Shapes:
    """The model if it is a hybrid or has one layer alone, else one full layer in six and a window of 1024 in the
    others."""
    if shapes.hybrid or shapes.num_layers == 1:
        return shapes
    return shapes.respanned(Span.sliding(HYBRID_WINDOW), round(shapes.num_layers / HYBRID_EVERY) or 1)


def window_of(shapes: Shapes) -> int:
    """The model's widest window, 1024 where it has none."""
    return max(shapes.windows, default=HYBRID_WINDOW)


def reference_of(shapes: Shapes) -> Shapes:
    """The model with reference windows in all layers: its own width where it has them, else 128."""
    if any(kind.span.kind is SpanKind.REFERENCE for kind in shapes.kinds):
        return shapes
    return shapes.respanned(Span(SpanKind.REFERENCE, REFERENCE_WINDOW))


def forms(shapes: Shapes) -> dict[str, Shapes]:
    """The model's layers as full, hybrid (where there are two at least), pure windows and reference windows."""
    hybrid = {"hybrid": hybrid_of(shapes)} if shapes.num_layers > 1 else {}
    return {
        "full": shapes.respanned(Span.full()),
        **hybrid,
        "pure window": shapes.respanned(Span.sliding(window_of(shapes))),
        "R-SWA": reference_of(shapes),
    }


def designs(layout: Layout, tokens: int = MILLION, prompt: int = MILLION_PROMPT) -> tuple[Cost, ...]:
    """What ``tokens`` tokens cost each way; the reference window's prompt has ``prompt`` of them."""
    shapes, prompt = layout.shapes, min(prompt, tokens)
    made = forms(shapes)
    full, pure, reference = made["full"], made["pure window"], made["R-SWA"]
    window = window_of(shapes)
    return (
        _cost("full", "every layer sees everything", layout, full, tokens, tokens, "all facts; memory and time grow"),
        *(_hybrid(layout, made["hybrid"], tokens) if "hybrid" in made else ()),
        _cost(
            "pure window",
            f"window {window} in every layer",
            layout,
            pure,
            tokens,
            tokens,
            f"facts older than {window} tokens only as far as layers pass them on",
        ),
        _cost(
            "R-SWA",
            f"prompt of {spaced(prompt)} and the last {max(reference.windows)}",
            layout,
            reference,
            tokens,
            prompt,
            "the prompt; its own answer only lately",
        ),
        _sparse(layout, full, tokens),
        _linear(shapes, tokens),
    )


def _hybrid(layout: Layout, shapes: Shapes, tokens: int) -> tuple[Cost]:
    full = shapes.count(False)
    rule = f"{full} full, {shapes.count(True)} of window {max(shapes.windows)}"
    return (_cost("hybrid", rule, layout, shapes, tokens, tokens, f"all facts through {full} layers"),)


def _cost(name: str, rule: str, layout: Layout, shapes: Shapes, tokens: int, prompt: int, gives: str) -> Cost:
    held = sum(replace(layout, shapes=shapes).row_bytes(tokens, prompt).values())
    flop = attention_flop(shapes, tokens - 1, prompt)
    return Cost(name, rule, held, held, flop, attention_total_flop(shapes, tokens, prompt), gives)


def _sparse(layout: Layout, full: Shapes, tokens: int) -> Cost:
    held = sum(replace(layout, shapes=full).row_bytes(tokens, tokens).values())
    index = INDEX_BYTES * full.num_layers * tokens
    few = full.respanned(Span.sliding(TOP_KEYS))
    read = held * min(TOP_KEYS, tokens) // tokens + index
    pair = INDEX_PAIR_FLOP * full.num_layers
    return Cost(
        "sparse",
        f"the best {TOP_KEYS} keys of all, found by an index",
        held + index,
        read,
        attention_flop(few, tokens - 1, tokens) + pair * tokens,
        attention_total_flop(few, tokens, tokens) + pair * Span.full().bind(tokens).num_pairs(tokens),
        "all facts; memory grows as for full",
    )


def _linear(shapes: Shapes, tokens: int) -> Cost:
    cells = sum(k.count * k.num_heads * k.head_dim * max(k.v_head_dim, 1) for k in shapes.kinds)
    return Cost(
        "linear",
        "a state of key by value in each head, no rows",
        _STATE_BYTES * cells,
        2 * _STATE_BYTES * cells,
        4 * cells,
        4 * cells * tokens,
        "what the state keeps; sash has no such layers",
    )


def policies(layout: Layout) -> tuple[Policy, ...]:
    """Ways to store this model's rows: its own, one uniform cache, int8, and bounded full layers."""
    shapes = layout.shapes
    out = [
        Policy("as it is", layout, True, "exact"),
        Policy("one uniform cache", replace(layout, shapes=shapes.respanned(Span.full())), True, "windows only masked"),
    ]
    if "int8" not in layout.dtypes:
        rows = replace(layout.precision, kv="int8", window_kv=None)
        out.append(Policy("int8 rows", replace(layout, precision=rows), False, "within 0.3 % of perplexity"))
    if shapes.count(False):
        for recent in RECENT:
            span = Span.sliding(recent - SINKS, SINKS)
            kept = replace(layout, shapes=shapes.bounded(span))
            out.append(Policy(f"{SINKS} sinks + recent, {recent}", kept, False, "full layers forget the middle"))
        reference = replace(layout, shapes=shapes.bounded(Span(SpanKind.REFERENCE, REFERENCE_WINDOW)))
        out.append(Policy(f"R-SWA {REFERENCE_WINDOW}", reference, False, "needs a model trained so"))
    return tuple(out)
