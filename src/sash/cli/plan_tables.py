"""A plan for people: the answer first, one table, the advice; everything else behind ``--all``."""

from __future__ import annotations

from dataclasses import replace

from sash.cli.columns import Page
from sash.planner.capacity import Precision
from sash.planner.compute import attention_flop, crossover_prompt, crossover_token, linear_flop
from sash.planner.designs import MILLION
from sash.planner.plan import Plan
from sash.planner.shapes import Shapes
from sash.planner.solve import Answer
from sash.planner.speed import prefill
from sash.planner.units import amount, figures, seconds, share, size, spaced, tokens_of


def print_plan(plan: Plan, *, everything: bool, note: str = "") -> None:
    """The short form, or all tables; ``note`` stands behind the answer."""
    page = Page()
    page.say(f"{page.styled(plan.shapes.name)}  {describe(plan.shapes)}")
    first, *more = headline(plan)
    page.say(page.styled(first, "1;32" if plan.answer.fits else "1;31"))
    for line in [*more, *([note] if note else [])]:
        page.say(line)
    if plan.answer.beyond:
        page.say(page.styled(warning(plan), "1;33"))
    if plan.answer.context:
        _memory(page, plan)
        page.say("")
        for line in _times(plan):
            page.say(line)
        for piece in plan.advice():
            page.say(f"• {page.styled(piece.do)}: {piece.because}", indent="  ")
    if everything and plan.answer.context:
        for print_part in (_pools, _policies, _tiers, _compute, _estimates, _million):
            print_part(page, plan)
    elif not everything:
        page.say(
            page.styled("\n--all: pool ratios, policies, tiers, operations, rules of thumb, a million tokens", "2")
        )


def describe(shapes: Shapes) -> str:
    """``62 layers (52 window 1024, 10 full), 27.0 G weights, made for 131 072 tokens``."""
    spans: dict[str, int] = {}
    for kind in shapes.kinds:
        name = kind.span.describe() + (" on shared rows" if kind.shared else "")
        spans[name] = spans.get(name, 0) + kind.count
    parts = [f"{shapes.num_layers} layers ({', '.join(f'{n} {name}' for name, n in spans.items())})"]
    count = shapes.weights
    if count is not None:
        active = "" if count.active + count.embed >= count.total else f", {amount(count.active)} active"
        parts.append(f"{amount(count.total)} weights{active}{' (rounded)' if count.rounded else ''}")
    else:
        parts.append("weights unknown (--params)")
    if shapes.max_position:
        parts.append(f"made for {tokens_of(shapes.max_position)}")
    return ", ".join(parts)


def headline(plan: Plan) -> list[str]:
    """The answer in a sentence, and where the memory goes."""
    a = plan.answer
    who, precision = _who(a), _precision(a)
    limit = f"{size(a.memory_bytes)}" if a.memory_bytes is not None else f"{size(a.kv_bytes)} of KV memory"
    if a.solved == "memory":
        lines = [f"{who} {_verb('need', a.requests)} {_needed(a)} ({precision})"]
    elif a.fits:
        if a.solved == "context":
            who = who.replace(" of ", " of up to ", 1)
        found = f"{who} {_verb('fit', a.requests)} {limit}"
        lines = [f"{found} with {precision}" if a.solved == "precision" else f"{found} ({precision})"]
        if a.solved == "context" and a.context == a.shapes.max_position:
            lines[0] += ", all that the model was made for"
    else:
        lines = [f"{limit} is too little ({precision}): {_missing(plan)}"]
    if a.memory_bytes is not None and a.weight_bytes is not None and a.kv_bytes:
        parts = f"{size(a.weight_bytes)} weights + {size(a.kv_bytes)} KV + {size(a.reserve_bytes)} reserve"
        lines.append(f"= {parts}")
    if ways := _ways(plan):
        lines.append("what would fit: " + "; or ".join(ways))
    if a.fits and a.requests > 1 and a.solved != "memory":
        lines.append(f"one request alone: up to {tokens_of(plan.longest())}")
    return lines


def _verb(word: str, count: int) -> str:
    return word if count > 1 else f"{word}s"


def _who(a: Answer) -> str:
    return f"{a.requests} request{'' if a.requests == 1 else 's'} of {tokens_of(a.context)}"


def _precision(a: Answer) -> str:
    return a.layout.precision.describe() if a.weight_bytes is not None else f"{a.layout.precision.kv} KV"


def _ways(plan: Plan) -> list[str]:
    """What would fit; the options of a precision are named where it is first spoken of."""
    named = {plan.answer.layout.precision}
    out = []
    for other in plan.instead():
        precision = other.layout.precision
        out.append(_way(other, plan) + ("" if precision in named else f" ({_options(precision)})"))
        named.add(precision)
    return out


def _options(precision: Precision) -> str:
    """Of ``sash plan`` and ``sash serve``."""
    weights = f"--quantization {precision.weights} " if precision.weights in ("int8", "int4") else ""
    return f"{weights}--kv-cache-dtype {precision.kv}"


def _way(other: Answer, plan: Plan) -> str:
    a, precision = plan.answer, other.layout.precision
    stored = _precision(other) if a.memory_bytes is not None else f"{precision.kv} KV"
    if other.solved == "precision":
        return stored
    way = _who(other)
    if other.solved == "memory":
        way = _needed(other) + ("" if (other.context, other.requests) == (a.context, a.requests) else f" for {way}")
    return way if precision == a.layout.precision else f"{way} with {stored}"


def _needed(a: Answer) -> str:
    if a.memory_bytes is None:
        return f"{size(a.needed_bytes, up=True)} of KV memory"
    return size(a.memory_bytes, up=True)


def warning(plan: Plan) -> str:
    """For a context beyond the model's own: what still holds of the plan, and what doesn't."""
    a = plan.answer
    return (
        f"warning: {tokens_of(a.beyond)} more than the model was made for ({spaced(a.shapes.max_position)}): bytes and "
        "times hold, but answers get worse there unless its positions are scaled (such as by YaRN), windows or not"
    )


def _missing(plan: Plan) -> str:
    a = plan.answer
    if a.memory_bytes is not None and a.weight_bytes is not None and a.weight_bytes + a.reserve_bytes >= a.memory_bytes:
        return f"weights alone take {size(a.weight_bytes)}, the reserve {size(a.reserve_bytes)}"
    asked = replace(a, requests=max(a.requests, 1), context=max(a.context, 1))
    needs = f"{_who(asked)} {_verb('need', asked.requests)} {size(a.needed_bytes, up=True)} of KV"
    return f"{needs}, there are {size(a.kv_bytes)}"


def _memory(page: Page, plan: Plan) -> None:
    a, layout = plan.answer, plan.layout
    demand = layout.demand(a.context, 1)
    held = layout.held_pages(a.context, a.prompt)
    rows = []
    for g, dtype, pages, each, pool in zip(
        plan.shapes.groups, layout.dtypes, held, demand.page_bytes(), a.pages, strict=True
    ):
        rows.append(
            (
                f"{g.name} ({g.span.describe()}, {dtype})" if g.bounded else f"{g.name} ({dtype})",
                len(g.layers),
                size(layout.token_bytes[g.name]),
                f"{size(pages * each)} ({spaced(pages)} pages)",
                f"{size(pool * each)} ({spaced(pool * layout.page_size)} tokens)",
            )
        )
    own, uniform = layout.held_bytes(a.context, a.prompt), layout.uniform_bytes(a.context)
    token = sum(layout.token_bytes.values())
    total = sum(n * b for n, b in zip(a.pages, demand.page_bytes(), strict=True))
    stored = sum(len(g.layers) for g in plan.shapes.groups)
    rows.append(
        (
            "together",
            stored,
            size(token),
            f"{size(own)} ({share(own, uniform)} of a uniform cache's {size(uniform)})",
            size(total),
        )
    )
    page.table("", ("pool", "layers", "a token", "a request", "pool, automatic split"), rows, total=True)


def _times(plan: Plan) -> list[str]:
    times, device = plan.times(), plan.device
    if device is None or not plan.answer.fits:
        return []
    if not times:
        return [f"times on {device.name} need the weights: give --params"]
    word = "about" if device.habits else "at best"
    first = times["prefill"]
    a = plan.answer
    out = f"on {device.name} {word}: prefill {seconds(first.total_s)} ({amount(a.prompt / first.total_s)} tokens/s)"
    for name, step in times.items():
        if name.startswith("decode"):
            n = int(name.split()[1])
            rate = f"{amount(n / step.total_s)} tokens/s, bound by {step.bound_by}"
            out += f"; decode{'' if n == 1 else f' for {n}'} {seconds(step.total_s)} a step ({rate})"
    return [out]


def _pools(page: Page, plan: Plan) -> None:
    a, layout = plan.answer, plan.layout
    each = layout.demand(a.context, 1).page_bytes()
    rows = [
        (
            "automatic" if row.ratio is None else f"ratio {row.ratio:g}",
            *(f"{spaced(n * layout.page_size)} tokens, {size(n * b)}" for n, b in zip(row.pages, each, strict=True)),
            row.requests,
        )
        for row in plan.pools()
    ]
    names = [g.name for g in plan.shapes.groups]
    page.table(f"Pools of {size(a.kv_bytes)}", ("split", *names, f"fit of {spaced(a.context)}"), rows)


def _policies(page: Page, plan: Plan) -> None:
    a = plan.answer
    rows = []
    for p in plan.policies():
        held, fits = p.layout.held_bytes(a.context, a.prompt), p.layout.most_requests(a.context, a.prompt, a.kv_bytes)
        own = share(held, plan.layout.uniform_bytes(a.context))
        rows.append((p.name, size(held), own, fits, "same answers" if p.exact else "other answers", p.note))
    page.table(
        f"Ways to store it ({spaced(a.context)} tokens, of them {spaced(a.context - a.prompt)} generated)",
        ("policy", "a request", "of uniform", "fit", "", ""),
        rows,
    )


def _tiers(page: Page, plan: Plan) -> None:
    if not plan.tiers:
        return
    a, device = plan.answer, plan.device
    anew = "give --device or --measure"
    if device is not None:
        known = plan.shapes.weights is not None
        anew = seconds(prefill(plan.layout, device, a.context).total_s) if known else "give --params"
    each = plan.layout.held_bytes(a.context, a.prompt)
    rows = [
        (
            t.name,
            size(t.num_bytes),
            spaced(t.num_bytes // each),
            seconds(each / t.read_bytes_per_s) if t.read_bytes_per_s else "give @RATE",
            anew,
        )
        for t in plan.tiers
    ]
    title = f"Kept prefixes of {tokens_of(a.context)}, {size(each)} each"
    page.table(title, ("tier", "size", "prefixes", "read back", "computed anew"), rows)


def _compute(page: Page, plan: Plan) -> None:
    a, shapes = plan.answer, plan.shapes
    cost = attention_flop(shapes, a.context - 1, a.prompt)
    rows: list[tuple[object, ...]] = [(f"attention of token {spaced(a.context)}", f"{amount(cost)} operations")]
    if shapes.weights is not None:
        token, prompt = crossover_token(shapes), crossover_prompt(shapes)
        rows += [
            ("linear layers of a token (2 × all weights)", f"{amount(linear_flop(shapes))} operations"),
            ("attention of one token as costly from", "never" if token is None else tokens_of(token)),
            ("attention of a whole prompt as costly from", "never" if prompt is None else tokens_of(prompt)),
        ]
    page.table("Operations", ("", ""), rows)


def _estimates(page: Page, plan: Plan) -> None:
    def value(number: float, unit: str) -> str:
        return size(number) if unit == "bytes" else spaced(int(number)) if number == int(number) else figures(number)

    rows = [
        (e.name, e.rule, value(e.estimate, e.unit), value(e.exact, e.unit), e.unit, _off(e.factor), e.why)
        for e in plan.estimates()
    ]
    page.table("Rules of thumb beside exact values", ("of", "rule", "says", "exact", "unit", "off by", "why"), rows)


def _off(factor: float | None) -> str:
    if factor is None:
        return "-"
    if 0.995 < factor < 1.005:
        return "right"
    return f"{factor - 1:+.0%}" if 0.1 <= factor < 2 else f"× {figures(factor)}"


def _million(page: Page, plan: Plan) -> None:
    rows = [
        (c.name, c.rule, size(c.held_bytes), size(c.read_bytes), amount(c.token_flop), amount(c.total_flop), c.gives)
        for c in plan.million()
    ]
    page.table(
        f"A request of {spaced(MILLION)} tokens each way (attention alone; operations)",
        ("attention", "rule", "held", "read a token", "op a token", "op in all", "keeps"),
        rows,
    )
