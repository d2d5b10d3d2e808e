"""What to do, and the number behind it, computed for this model at this length (the cost of int8 rows was measured)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from sash.planner.capacity import ring_pages
from sash.planner.compute import attention_flop, crossover_token, linear_flop
from sash.planner.designs import form_of, forms, hybrid_of, reference_of, window_of
from sash.planner.estimates import CHUNK, SHARED_RATIO, reach_of
from sash.planner.shapes import Shapes
from sash.planner.solve import Answer
from sash.planner.units import share, size, spaced, tokens_of
from sash.spec.span import SpanKind

# What answers draw on: facts anywhere, the last tokens, or the prompt and the last tokens.
Needs = Literal["distant", "recent", "prompt"]
NEEDS: tuple[Needs, ...] = ("distant", "recent", "prompt")
_WHEN = {
    "distant": "where answers need distant facts",
    "recent": "where answers need recent text alone",
    "prompt": "where answers need their prompt",
}
# A cache below this share of the weights isn't worth a compromise.
_SMALL = 0.1
# Attention from this share of the linear layers' operations is felt.
_LARGE = 0.5


@dataclass(frozen=True, slots=True)
class Advice:
    """One piece: what to do, and why in numbers."""

    topic: str
    do: str
    because: str


def advise(answer: Answer, needs: Needs) -> tuple[Advice, ...]:
    """All advice for an answer."""
    pieces = [_choice(answer, needs), _ring(answer), _ratio(answer), _chunk(answer), _rows(answer), _time(answer)]
    return tuple(piece for piece in pieces if piece is not None)


def _choice(answer: Answer, needs: Needs) -> Advice:
    """Full, hybrid, pure or R-SWA: the first that gives what is needed and fits; all sizes beside it."""
    layout, shapes, context, prompt = answer.layout, answer.shapes, answer.context or 1, answer.prompt
    sizes = {n: replace(layout, shapes=form).held_bytes(context, prompt) for n, form in forms(shapes).items()}
    told = f"a request of {tokens_of(context)}: " + ", ".join(f"{n} {size(value)}" for n, value in sizes.items())
    do, why = _chosen(answer, needs, sizes)
    if do != "full":
        why += f", {share(sizes[do], sizes['full'])} of full storage"
    own = form_of(shapes)
    if do != own and context > window_of(shapes) and (do != "full" or own == "pure window"):
        why += f"; this model is {own}: that needs another one, trained so"
    return Advice("span", f"{do}, {_WHEN[needs]}", f"{why} ({told})")


def _chosen(answer: Answer, needs: Needs, sizes: dict[str, int]) -> tuple[str, str]:
    """A key of ``sizes``, and why."""
    shapes, context, seats = answer.shapes, answer.context or 1, max(answer.requests, 1)
    window, late = window_of(shapes), max(reference_of(shapes).windows)
    generated = context - answer.prompt
    if context <= window:
        return "full", f"{tokens_of(context)} lie within a window of {spaced(window)}, which then saves nothing"
    if needs == "recent":
        return "pure window", f"the last {tokens_of(window)} are enough, however long the text"
    if needs == "prompt":
        if generated > late:
            return "R-SWA", f"the prompt stays, and of {tokens_of(generated)} of answer the last {late}"
        return "full", f"{tokens_of(generated)} of answer don't fill a window of {late}, so nothing would slide"
    caches = seats * sizes["full"]
    weights = answer.weight_bytes
    if weights is not None and caches <= min(answer.kv_bytes, int(_SMALL * weights)):
        return "full", f"caches take {size(caches)} in all, {share(caches, weights)} of the weights"
    hybrid = hybrid_of(shapes)
    if hybrid is None:
        return "full", f"caches take {size(caches)} in all, and one layer can't be both"
    layers = hybrid.count(False)
    return "hybrid", f"{layers} full layer{' sees' if layers == 1 else 's see'} everything"


def _ring(answer: Answer) -> Advice:
    layout, shapes, context = answer.layout, answer.shapes, answer.context or 1
    uniform, own = layout.uniform_bytes(context), layout.held_bytes(context, answer.prompt)
    if not shapes.windows:
        each = size(sum(layout.token_bytes.values()))
        return Advice(
            "ring", "no ring is needed", f"every layer sees everything: {each} a token, {size(own)} a request"
        )
    window = max(shapes.windows)
    if own >= uniform:
        return Advice(
            "ring", "no ring is needed", f"a request of {tokens_of(context)} never leaves a window of {window}"
        )
    if shapes.hybrid:
        rows = layout.token_bytes
        floor = sum(rows[g.name] for g in shapes.groups if not g.bounded) / sum(rows.values())
        because = (
            f"{size(own)} instead of {size(uniform)} a request; longer ones tend to {share(floor, 1)}, not to nothing"
        )
    else:
        because = f"{size(own)} instead of {size(uniform)} a request, at any length; {_reach(shapes)}"
    if all(kind.span.kind is SpanKind.REFERENCE for kind in shapes.kinds):
        because = f"{size(own)} instead of {size(uniform)} a request; a longer answer takes no more"
    return Advice("ring", f"keep the rings: {share(own, uniform)} of one uniform cache", because)


def _reach(shapes: Shapes) -> str:
    """How far back an answer of a model of windows or chunks alone can draw on the text."""
    most, likely = reach_of(shapes)
    window = max(shapes.windows)
    if likely is None:
        return f"the last {tokens_of(window)} at most are seen, and nothing from before their chunk"
    return (
        f"{tokens_of(window)} are seen directly, about {tokens_of(likely)} reach an answer through the layers, "
        f"{tokens_of(most)} at the very most"
    )


def _ratio(answer: Answer) -> Advice | None:
    layout, context, seats = answer.layout, answer.context, answer.requests
    if not answer.shapes.hybrid or not context or not seats or answer.kv_bytes < layout.request_bytes(context):
        return None
    need = layout.demand(context, 1).request_pages()
    full = max(n for g, n in zip(answer.shapes.groups, need, strict=True) if not g.bounded)
    pages = layout.ratio_pools(context, seats, answer.kv_bytes, SHARED_RATIO)
    fewer, own = (layout.fitting(p, context, answer.prompt) for p in (pages, answer.pages))
    if fewer >= own:
        return None
    return Advice(
        "ratio",
        "leave swa_full_tokens_ratio to the automatic split",
        f"a request needs {ring_pages(layout, context) / full:.3f} window tokens per full token; {SHARED_RATIO} "
        f"would hold {fewer} such request{'' if fewer == 1 else 's'} instead of {own}",
    )


def _chunk(answer: Answer) -> Advice | None:
    layout, shapes = answer.layout, answer.shapes
    if not shapes.windows or not answer.context or any(k.span.kind is SpanKind.REFERENCE for k in shapes.kinds):
        return None
    window, rows = max(shapes.windows), layout.token_bytes
    bounded = sum(rows[g.name] for g in shapes.groups if g.bounded)
    if window > CHUNK:
        chunks = f"{window} rows of a window cost {window / CHUNK:.0f} chunks of {CHUNK}"
    else:
        chunks = f"a chunk of {CHUNK} passes a window of {window} whole"
    kept = tokens_of(ring_pages(layout, answer.context) * layout.page_size)
    return Advice(
        "chunk",
        "choose the prefill chunk for speed alone",
        f"a ring keeps {kept} at any chunk ({chunks}); engines that "
        f"set W + chunk aside take {size(CHUNK * bounded)} more a request at {CHUNK}",
    )


def _rows(answer: Answer) -> Advice | None:
    layout = answer.layout
    if "int8" in layout.dtypes or not answer.context or not answer.kv_bytes:
        return None
    narrow = replace(layout, precision=replace(layout.precision, kv="int8", window_kv=None))
    now = layout.most_requests(answer.context, answer.prompt, answer.kv_bytes)
    then = narrow.most_requests(answer.context, answer.prompt, answer.kv_bytes)
    each = narrow.held_bytes(answer.context, answer.prompt)
    if then <= now or answer.solved == "memory":
        return None
    return Advice(
        "rows",
        "int8 rows if more must run at once",
        f"{then} requests instead of {now}, {size(each)} each; perplexity of two small models changed by 0.3 % at most",
    )


def _time(answer: Answer) -> Advice | None:
    shapes, context = answer.shapes, answer.context
    if shapes.weights is None or not context:
        return None
    cost = attention_flop(shapes, context - 1, answer.prompt)
    linear, cross = linear_flop(shapes), crossover_token(shapes)
    meets = f"the two meet at {tokens_of(cross)}" if cross else "the two never meet"
    if cost < _LARGE * linear:
        return Advice(
            "time",
            "expect memory from a window here, not speed of products",
            f"at {tokens_of(context)} attention costs {share(cost, linear)} of the linear layers; {meets}",
        )
    return Advice(
        "time",
        "attention is a large part here: windows save time as well",
        f"at {tokens_of(context)} it costs {cost / linear:.1f} × the linear layers; {meets}",
    )
