"""Three things that people say about memory and speed of windows, each measured. The fourth is in ``needle``."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from sash.engine.llm import engine_config
from sash.lab.context import Context, all_full, all_windows
from sash.lab.experiment import Axis, Experiment, Finding, NotApplicable, Plot, holds
from sash.lab.session import Session
from sash.lab.timing import in_turns, ms, seconds
from sash.spec.footprint import row_bytes
from sash.spec.model import ModelSpec

_MIB = 2**20
_EVEN = 0.07  # part by which two equal times may differ


def _needs_window(context: Context) -> int:
    if not context.window:
        raise NotApplicable("no layer of this model has a window.")
    return context.window


def _held(context: Context, storage: str, spec: ModelSpec | None, lengths: list[int]) -> list[int]:
    """Bytes of the pages that hold rows of one request, at each length."""
    session, text = Session(context.weights, storage, lengths[-1], spec), context.ids(lengths[-1])
    out = []
    for length in lengths:
        session.feed(text[session.length : length])
        out.append(sum(session.held_bytes().values()))
    return out


# ------------------------------------------------------------------------------- 1: a mask saves memory


def run_mask(context: Context) -> Finding:
    return measure_mask(context, context.pick((1, 2, 4, 8, 16), (1, 2, 4)))


def measure_mask(context: Context, shares: tuple[float, ...]) -> Finding:
    window, lengths = _needs_window(context), context.in_windows(shares)
    kinds = {
        "full attention": ("ring", all_full(context.spec)),
        "window as a mask": ("full storage", None),
        "window as a ring": ("ring", None),
    }
    held = {name: _held(context, *how, lengths) for name, how in context.track("myth-mask", list(kinds.items()))}
    rows = [{"length": n, **{name: held[name][i] / _MIB for name in kinds}} for i, n in enumerate(lengths)]
    full, mask, ring = (held[name][-1] for name in kinds)
    last = lengths[-1]
    sentence = (
        f"At {last} tokens full attention holds {full / _MIB:.1f} MiB and the same model with its windows as a mask "
        f"{mask / _MIB:.1f} MiB, {100 * (1 - mask / full):.0f} % less; only the ring gives memory back: "
        f"{ring / _MIB:.1f} MiB."
    )
    together = "the same" if held["full attention"] == held["window as a mask"] else "apart"
    plot = Plot(
        "myth-mask",
        "KV memory with a mask and with a ring",
        Axis("length", "tokens", 2),
        Axis("rows of all layers", "MiB"),
        {name: [(float(n), b / _MIB) for n, b in zip(lengths, held[name], strict=True)] for name in kinds},
        marks=((float(window), f"W = {window}"),),
        reading=f"The lines of full attention and of the mask are {together}"
        f"; the ring holds {100 * ring / full:.0f} % of them at {last} tokens.",
    )
    return Finding(
        "myth-mask",
        holds(held["full attention"] == held["window as a mask"], ring < full or last <= window),
        sentence,
        rows,
        {"length": "tokens", **dict.fromkeys(kinds, "MiB")},
        [plot],
        f"One request read up to {last} tokens by each engine; bytes of the pages that it holds.",
    )


# ---------------------------------------------------------------------------- 2: hybrid memory is constant


def run_growth(context: Context) -> Finding:
    return measure_growth(context, context.pick((0.5, 1.25, 2, 4, 8, 16), (0.5, 2, 4)))


def measure_growth(context: Context, shares: tuple[float, ...]) -> Finding:
    window, lengths, spec = _needs_window(context), context.in_windows(shares), context.spec
    if all(layer.span.bounded for layer in spec.layers):
        raise NotApplicable("every layer of this model has a window: it is no hybrid.")
    page = engine_config({}).page_size
    past = [n for n in lengths if n >= window + page]  # where rings are full
    if len(past) < 2:
        raise NotApplicable(
            f"growth needs two lengths past the window of {window}, such as --lengths {2 * window},{4 * window}"
        )
    kinds = {"full": all_full(spec), "hybrid": spec, "pure": all_windows(spec, window)}
    held = {name: _held(context, "ring", it, lengths) for name, it in context.track("myth-growth", list(kinds.items()))}
    a, b = past[-2:]
    slopes = {name: (sizes[-1] - sizes[-2]) / (b - a) for name, sizes in held.items()}
    config = context.weights.built.config
    predicted = sum(
        row_bytes(g, dtype) for g, dtype in zip(config.groups, config.demand.dtypes, strict=True) if not g.bounded
    )
    rows = [
        {
            "stack": name,
            "full layers": sum(not layer.span.bounded for layer in it.layers),
            "growth": slopes[name],
            "held": held[name][-1] / _MIB,
        }
        for name, it in kinds.items()
    ]
    share = slopes["hybrid"] / slopes["full"]
    sentence = (
        f"Past the window the full stack grows by {slopes['full']:.0f} bytes a token, the hybrid by "
        f"{slopes['hybrid']:.0f} and the pure one by {slopes['pure']:.0f}: a hybrid's memory keeps growing, at "
        f"{100 * share:.0f} % of full attention's rate, which is its share of full layers ({rows[1]['full layers']} "
        f"of {len(spec.layers)})."
    )
    plot = Plot(
        "myth-growth",
        "KV memory of full, hybrid and pure",
        Axis("length", "tokens"),
        Axis("rows of all layers", "MiB"),
        {name: [(float(n), x / _MIB) for n, x in zip(lengths, held[name], strict=True)] for name in kinds},
        marks=((float(window), f"W = {window}"),),
        reading=f"Three slopes between {a} and {b} tokens: {slopes['full']:.0f}, {slopes['hybrid']:.0f} and "
        f"{slopes['pure']:.0f} bytes a token; the formula says {predicted} for the hybrid.",
    )
    return Finding(
        "myth-growth",
        holds(
            abs(slopes["hybrid"] - predicted) * (b - a) < page * predicted,  # pages are held whole
            slopes["pure"] == 0,
            slopes["full"] > slopes["hybrid"],
        ),
        sentence,
        rows,
        {"full layers": "layers", "growth": "bytes a token", "held": "MiB"},
        [plot],
        f"One request read up to {b} tokens through each stack; growth between {a} and {b}. The pure stack is the "
        "same model with its window in every layer.",
    )


# ------------------------------------------------------------------------- 3: windows make everything faster


@dataclass(frozen=True, slots=True)
class SpeedPlan:
    """``steps`` tokens written after each of ``lengths``, prompts of ``prompts`` read ``reads`` times; lengths are in
    windows."""

    lengths: tuple[float, ...]
    steps: int
    prompts: tuple[float, ...]
    reads: int


def run_speed(context: Context) -> Finding:
    full = SpeedPlan((0.125, 0.5, 0.875, 2, 8, 32), 48, (0.5, 8), 3)
    return measure_speed(context, context.pick(full, SpeedPlan((0.25, 0.875, 16), 32, (0.5,), 3)))


def measure_speed(context: Context, plan: SpeedPlan) -> Finding:
    window, lengths = _needs_window(context), context.in_windows(plan.lengths, plan.steps)
    if context.lengths and lengths[0] + plan.steps > window:
        raise NotApplicable(f"one length must lie below the window of {window} with {plan.steps} more: see --lengths.")
    specs = {"windows": None, "full": all_full(context.spec)}
    text = context.ids(lengths[-1] + plan.steps)
    sessions = {name: Session(context.weights, "ring", len(text), spec) for name, spec in specs.items()}
    rows: list[dict[str, Any]] = []
    for length in context.track("myth-speed", lengths):
        for session in sessions.values():
            session.feed(text[session.length : length])
        places = dict.fromkeys(sessions, length)
        times = in_turns({name: _writer(s, text, places, name) for name, s in sessions.items()}, plan.steps)
        rows.append(_speed_row("write", length, times))
    for prompt in context.in_windows(plan.prompts):
        times = {name: [] for name in specs}
        for _ in range(plan.reads):
            for name, spec in specs.items():
                session = Session(context.weights, "ring", prompt, spec)
                times[name].append(seconds(lambda: session.feed(text[:prompt])))  # noqa: B023
        rows.append(_speed_row("read", prompt, times))
    return _speed_finding(window, plan, rows)


def _writer(session: Session, text: list[int], places: dict[str, int], name: str) -> Any:
    def write() -> None:
        session.feed([text[places[name]]])
        places[name] += 1

    return write


def _speed_row(what: str, length: int, times: dict[str, list[float]]) -> dict[str, Any]:
    fast = {name: ms(values, min) for name, values in times.items()}
    return {
        "work": f"{what} a token" if what == "write" else "read a prompt",
        "length": length,
        "windows": fast["windows"],
        "full": fast["full"],
        "full / windows": statistics.median(a / b for a, b in zip(times["full"], times["windows"], strict=True)),
    }


def _speed_finding(window: int, plan: SpeedPlan, rows: list[dict[str, Any]]) -> Finding:
    writes = [row for row in rows if row["work"] == "write a token"]
    short = [row for row in writes if row["length"] + plan.steps <= window]
    if not short:
        raise NotApplicable(f"nothing was written below the window of {window}, where both should take the same time.")
    last = writes[-1]
    even = all(abs(row["full / windows"] - 1) <= _EVEN for row in short)
    gain = last["full / windows"]
    ratios = " and ".join(f"{row['full / windows']:.2f}" for row in short)
    sentence = (
        f"Below W = {window} full attention takes {ratios} times the time of windows to write a token: "
        f"{'no difference, because both see the same' if even else 'a difference that should not be there'}. At "
        f"{last['length']} tokens it takes {gain:.2f} times as long."
    )
    plot = Plot(
        "myth-speed",
        "Time to write one token, with and without windows",
        Axis("length", "tokens", 2),
        Axis("fastest step", "ms"),
        {name: [(float(row["length"]), row[name]) for row in writes] for name in ("windows", "full")},
        marks=((float(window), f"W = {window}"),),
        reading=f"Up to W the lines {'lie together' if even else 'should lie together, and do not'}; at "
        f"{last['length']} tokens it is {last['windows']:.2f} ms with windows against {last['full']:.2f} without.",
    )
    return Finding(
        "myth-speed",
        holds(even, last["length"] <= 4 * window or gain > 1.1),
        sentence,
        rows,
        {"length": "tokens", "windows": "ms", "full": "ms", "full / windows": "times"},
        [plot],
        f"The same weights with the model's windows and with full attention in every layer, {plan.steps} tokens "
        f"written in turns after each length, prompts read {plan.reads} times in turns; fastest of each, and the "
        "ratio of medians.",
    )


MASK = Experiment(
    "myth-mask",
    "Myth 1: a window mask saves memory",
    "A window that is only a mask over full storage saves no memory at all; what saves is giving rows back.",
    """
The first of four things that are often said. "The model has sliding windows, so its cache is small": only if the
program gives back what has slid out. Many load such a model, apply the mask, and keep every row.
""",
    run_mask,
)
GROWTH = Experiment(
    "myth-growth",
    "Myth 2: with windows, memory stops growing",
    "A hybrid's memory keeps growing with its full layers' rows; only a pure window model's stops.",
    """
"Sliding windows mean constant memory." True for the window layers. Most models of today are hybrid, and their few
full layers go on storing every token. How fast does each kind of stack grow?
""",
    run_growth,
)
SPEED = Experiment(
    "myth-speed",
    "Myth 3: windows make a model faster",
    "Below the window nothing is faster, because both see the same; the gain comes with length.",
    """
"Use windows for speed." A window saves the work of looking at what lies outside it. In a short text nothing does.
""",
    run_speed,
)
