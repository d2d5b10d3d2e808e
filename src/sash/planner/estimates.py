"""Rules of thumb that circulate, beside the exact value: what each says for this model, and why it is off."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sash.planner.capacity import Layout, largest, ring_pages
from sash.planner.compute import crossover_prompt, crossover_token
from sash.planner.shapes import Shapes
from sash.spec.footprint import KV_BYTES
from sash.spec.span import Span, SpanKind

CHUNK = 512
SHARED_RATIO = 0.8
UTILISATION = 0.8
# Effective reach of stacked windows beside the residual path, in windows: about 1.5, not the number of layers.
REACH_WINDOWS = 1.5


@dataclass(frozen=True, slots=True)
class Estimate:
    """One rule. ``factor`` is estimate / exact; None where the exact value is 0."""

    name: str
    rule: str
    unit: str
    estimate: float
    exact: float
    why: str

    @property
    def factor(self) -> float | None:
        """How far off the rule is."""
        return self.estimate / self.exact if self.exact else None


def estimates(layout: Layout, context: int, prompt: int, kv_bytes: int) -> tuple[Estimate, ...]:
    """Every rule that says something about this model at this context, under this budget of the pools."""
    shapes = layout.shapes
    out = [_calculator(layout, context, prompt)]
    if shapes.hidden:
        out += _deployment(layout, context, prompt, kv_bytes)
    if shapes.windows:
        out += _heads(layout)
    if _reference(shapes):
        out += _reference(shapes)  # what its layers hold depends on the prompt, not on W
    elif shapes.windows:
        out += [_reserved(layout, context), *_reach(shapes), _pays_from(layout)]
    if shapes.hybrid:
        out += [_like_pure(layout, context, prompt), *_ratio(layout, context)]
    if shapes.weights is not None:
        out += _crossover(layout)
    return tuple(out)


def _reference(shapes: Shapes) -> list[Estimate]:
    """Of a model that has reference windows; else none."""
    widths = [kind.span.window for kind in shapes.kinds if kind.span.kind is SpanKind.REFERENCE]
    why = "the window is the model's: another one gives other answers"
    return [Estimate("reference window", "reference_window 512", "tokens", 512, max(widths), why)] if widths else []


def _calculator(layout: Layout, context: int, prompt: int) -> Estimate:
    kinds, size = layout.shapes.kinds, KV_BYTES[layout.precision.kv]
    each = sum(k.count * k.num_kv_heads * (k.head_dim + k.v_head_dim) for k in kinds) * size
    return Estimate(
        "KV calculators",
        "2 · layers · KV heads · head size · tokens · bytes",
        "bytes",
        each * context,
        sum(layout.row_bytes(context, prompt).values()),
        "ignores windows and shared rows; exact where every layer is full",
    )


def _deployment(layout: Layout, context: int, prompt: int, kv_bytes: int) -> list[Estimate]:
    """Capacity rules of a deployment guide."""
    shapes = layout.shapes
    window = max(shapes.windows, default=512)
    exact = sum(layout.row_bytes(context, prompt).values())
    fitting = layout.most_requests(context, prompt, kv_bytes) if kv_bytes else 0
    tokens = kv_bytes // max(sum(layout.token_bytes.values()), 1)
    return [
        Estimate(
            "memory of a sequence",
            "4 · (W · L + L · d_model), L tokens",
            "bytes",
            4 * (window * context + context * shapes.hidden),
            exact,
            "leaves out layers, KV heads and the weights",
        ),
        Estimate(
            "batch",
            "max_tokens // (W · d_model)",
            "requests",
            tokens // (window * shapes.hidden),
            fitting,
            "tokens over tokens · width: the units don't match",
        ),
        Estimate(
            "utilisation",
            "plan for 70-90 % of the pools",
            "requests",
            UTILISATION * fitting,
            fitting,
            "pages are promised before a request starts: all of them can be planned for",
        ),
        Estimate(
            "window by length",
            "64-128 below 512 tokens, 256-512 to 2048, 512 and more above",
            "tokens",
            128 if context < 512 else 512,
            float(max(shapes.windows, default=context)),
            "the window is the model's: another one gives other answers",
        ),
    ]


def _heads(layout: Layout) -> list[Estimate]:
    """Attention heads in place of KV heads, over all layers; of the first kind that has a ring."""
    kind = next((k for k in layout.shapes.kinds if k.span.bounded and not k.shared), None)
    if kind is None:
        return []
    size = KV_BYTES[layout.precision.window_kv or layout.precision.kv]
    row = (kind.head_dim + kind.v_head_dim) * size * kind.span.window
    return [
        Estimate(
            "ring memory",
            "2 · layers · attention heads · head size · W · bytes",
            "bytes",
            layout.shapes.num_layers * kind.num_heads * row,
            kind.count * kind.num_kv_heads * row,
            "KV heads store rows, and only window layers have a ring",
        )
    ]


def _reserved(layout: Layout, context: int) -> Estimate:
    window = max(layout.shapes.windows)
    return Estimate(
        "window memory in prefill",
        f"page + 2 · max(W, chunk), chunk {CHUNK}",
        "tokens",
        layout.page_size + 2 * max(window, CHUNK),
        ring_pages(layout, context) * layout.page_size,
        "rows of a chunk stay in hand here: a ring takes no room for them",
    )


def reach_of(shapes: Shapes) -> tuple[int, int | None]:
    """Tokens that can reach an answer through the layers of sliding windows, the newest among them: at the very most,
    and about how many do with strength (None: no such layers; nothing crosses the edge of a chunk)."""
    spans = [(kind.span, kind.count) for kind in shapes.kinds if kind.span.kind is SpanKind.SLIDING]
    if not spans:
        return max(shapes.windows, default=0), None
    most = 1 + sum(count * (span.window - 1) for span, count in spans)
    return most, min(int(REACH_WINDOWS * max(span.window for span, _ in spans)), most)


def _reach(shapes: Shapes) -> list[Estimate]:
    _, likely = reach_of(shapes)
    if likely is None:
        return []
    window = max(shapes.windows)
    full = "; full layers see everything" if shapes.hybrid else ""
    return [
        Estimate(
            "receptive field of the windows" if shapes.hybrid else "receptive field",
            "L · W",
            "tokens",
            shapes.count(True) * window,
            likely,
            f"an upper bound; beside the residual path about 1.5 W arrive{full}",
        )
    ]


def _like_pure(layout: Layout, context: int, prompt: int) -> Estimate:
    pure = replace(layout, shapes=layout.shapes.respanned(Span.sliding(max(layout.shapes.windows))))
    return Estimate(
        "a hybrid's memory",
        "close to pure windows",
        "bytes",
        sum(pure.row_bytes(context, prompt).values()),
        sum(layout.row_bytes(context, prompt).values()),
        "full layers grow: the share of full storage tends to F / (F + S)",
    )


def _ratio(layout: Layout, context: int) -> list[Estimate]:
    """The ratio that a request needs, and what a fixed one gains over a cache without windows."""
    groups, rows = layout.shapes.groups, layout.token_bytes
    need = layout.demand(context, 1).request_pages()
    full = max(n for g, n in zip(groups, need, strict=True) if not g.bounded)
    grow, slide = (sum(rows[g.name] for g in groups if g.bounded is kind) for kind in (False, True))
    return [
        Estimate(
            "ratio of the pools",
            f"swa_full_tokens_ratio {SHARED_RATIO}; 0.5-0.7 for long contexts",
            "window tokens per full token",
            SHARED_RATIO,
            ring_pages(layout, context) / full,
            "a request needs about W / length; what is above it lies idle",
        ),
        Estimate(
            "gain over a uniform cache",
            f"ratio {SHARED_RATIO} is the saving",
            "times the tokens",
            (grow + slide) / (grow + SHARED_RATIO * slide),
            layout.uniform_bytes(context) / layout.request_bytes(context),
            "rings alone save; a ratio near 1 stores nearly everything",
        ),
    ]


def _pays_from(layout: Layout) -> Estimate:
    def same(tokens: int) -> bool:
        return layout.request_bytes(tokens) >= layout.uniform_bytes(tokens)

    return Estimate(
        "context from which windows pay",
        "10 000 tokens (elsewhere 32 000)",
        "tokens",
        10_000,
        largest(same, max(layout.shapes.windows)) + 1,
        "every page beyond the ring is saved",
    )


def _crossover(layout: Layout) -> list[Estimate]:
    token, prompt = crossover_token(layout.shapes), crossover_prompt(layout.shapes)
    if token is None or prompt is None:
        return []
    return [
        Estimate(
            "attention overtakes the linear layers",
            "attention of the last token = 2 · all parameters",
            "tokens of a prompt",
            token,
            prompt,
            "true for that one token; a whole prompt's attention costs as much only later",
        )
    ]
