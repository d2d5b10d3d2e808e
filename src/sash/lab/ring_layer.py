"""One attention layer alone: its window in a ring, stored in full, shifted, or computed again for every token."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sash.kv.storage import KVRows, Planes
from sash.lab.context import Context
from sash.lab.experiment import Axis, Experiment, Finding, Plot, holds
from sash.lab.layer import OneLayer
from sash.lab.timing import seconds
from sash.ops.attention_reference import dense_attention
from sash.ops.base import Ops
from sash.ops.paged import PagedBatch, Segment
from sash.spec.span import Span, SpanKind

_EXPLANATION = """
Before the real model, the smallest thing that has a window: one attention layer by itself, fed with random tokens. A
window of W needs the last W rows of keys and values. There are four ways to have them, and they must give the same
answer:

**Ring:** room for W rows (in whole pages); the newest overwrites the oldest. Nothing moves. **Full storage:** keep
all rows, and look at the last W only. **Shift-left:** keep W rows in order, and move all of them one place for each
new token. **Re-computation:** keep the last W inputs, and make all W keys and values anew for each token. A fifth
line, the same layer with **full attention**, shows what the window saves: it must read every row there is.
"""
_CHUNK = 512
_GROWTH = 1.5  # most that attention in the ring may grow, by the clock
FOUR = ("ring", "full storage", "shift-left", "re-computation")
_FULL = "full attention"

_UNITS = {"length": "tokens", "held": "MiB", "time per token": "µs", "fastest": "µs", "attention alone": "µs"}


@dataclass(frozen=True, slots=True)
class Plan:
    """``steps`` tokens are written after each of ``lengths``. ``window`` and ``heads`` (of queries, of keys), ``dim``
    and ``hidden`` are the layer's."""

    lengths: tuple[int, ...]
    steps: int
    window: int = 512
    heads: tuple[int, int] = (4, 1)
    dim: int = 256
    hidden: int = 640


FULL = Plan((128, 512, 1024, 2048, 4096, 8192, 16_384, 19_936), 64)
QUICK = Plan((128, 1024, 4096), 16)


class Layer:
    """Projections of one layer with random weights, and its span."""

    def __init__(self, plan: Plan, seed: int, dtype: torch.dtype) -> None:
        source = torch.Generator().manual_seed(seed)
        self.plan, self.scale = plan, plan.dim**-0.5
        outs = [heads * plan.dim for heads in (plan.heads[0], plan.heads[1], plan.heads[1])]
        weights = [torch.randn(plan.hidden, out, generator=source) * plan.hidden**-0.5 for out in outs]
        self._q, self._k, self._v = (w.to(dtype) for w in weights)
        longest = plan.lengths[-1] + plan.steps
        self.inputs = torch.randn(longest, plan.hidden, generator=source).to(dtype)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """Inputs [N, hidden] to queries [N, Hq, D]."""
        return (x @ self._q).unflatten(-1, (self.plan.heads[0], self.plan.dim))

    def rows(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs [N, hidden] to keys and values [N, H, D]."""
        k, v = x @ self._k, x @ self._v
        return tuple(y.unflatten(-1, (self.plan.heads[1], self.plan.dim)) for y in (k, v))


class Stored:
    """The layer on the engine's ledger and pool."""

    def __init__(self, layer: Layer, ops: Ops, span: Span, keeps_all: bool = False) -> None:
        self._layer = layer
        self._one = OneLayer(
            span,
            ops,
            heads=layer.plan.heads[1],
            dim=layer.plan.dim,
            dtype=layer.inputs.dtype,
            max_len=len(layer.inputs),
            keeps_all=keeps_all,
        )

    def feed(self, start: int, end: int) -> torch.Tensor:
        """Attend with inputs start … end - 1; outputs [N, Hq, D]."""
        x = self._layer.inputs[start:end]
        return self._one.step(self._layer.queries(x), *self._layer.rows(x), self._layer.scale)

    @property
    def held_bytes(self) -> int:
        return self._one.held_bytes

    @property
    def attention_s(self) -> float:
        return self._one.attention_s


class Shifted:
    """Keys and values of the last W tokens in order, moved for each new one."""

    def __init__(self, layer: Layer, ops: Ops) -> None:
        plan = layer.plan
        self._layer, self._ops, self._window = layer, ops, plan.window
        shape = (plan.heads[1], plan.window + _CHUNK, plan.dim)
        self._k, self._v = (torch.zeros(shape, dtype=layer.inputs.dtype) for _ in range(2))
        self._held, self.attention_s = 0, 0.0

    def feed(self, start: int, end: int) -> torch.Tensor:
        """As for ``Stored``; one token at a time attends, a longer piece only fills."""
        layer, count = self._layer, end - start
        x = layer.inputs[start:end]
        new = slice(self._held, self._held + count)
        for plane, rows in zip((self._k, self._v), layer.rows(x), strict=True):
            plane[:, new] = rows.transpose(0, 1)
        self._held += count
        by = self._held - self._window
        if by > 0:
            size = self._k.shape[2] * self._k.element_size()
            for plane in (*self._k, *self._v):
                ctypes.memmove(plane.data_ptr(), plane.data_ptr() + by * size, self._window * size)
            self._held = self._window
        if count > 1:
            return x
        out, self.attention_s = _attend(layer, self._ops, layer.queries(x), Planes(self._k, self._v), end, self._held)
        return out

    @property
    def held_bytes(self) -> int:
        return 2 * self._held * self._k.shape[0] * self._k.shape[2] * self._k.element_size()


class Recomputed:
    """Only inputs are kept; keys and values of the window are made anew for each token."""

    def __init__(self, layer: Layer, ops: Ops) -> None:
        self._layer, self._ops, self._held, self.attention_s = layer, ops, 0, 0.0

    def feed(self, start: int, end: int) -> torch.Tensor:
        """As for ``Shifted``."""
        layer = self._layer
        first = max(0, end - layer.plan.window)
        self._held = end - first
        if end - start > 1:
            return layer.inputs[start:end]
        k, v = (rows.transpose(0, 1).contiguous() for rows in layer.rows(layer.inputs[first:end]))
        q = layer.queries(layer.inputs[start:end])
        out, self.attention_s = _attend(layer, self._ops, q, Planes(k, v), end, end - first)
        return out

    @property
    def held_bytes(self) -> int:
        return self._held * self._layer.plan.hidden * self._layer.inputs.element_size()


def _attend(layer: Layer, ops: Ops, q: torch.Tensor, planes: Planes, end: int, held: int) -> tuple[torch.Tensor, float]:
    """The query at ``end`` - 1 over ``held`` rows that stand in order from slot 0; and the kernel's seconds."""
    bound = Span.sliding(layer.plan.window).bind(len(layer.inputs))
    positions = torch.arange(end - held, end)
    segment = Segment(bound, 0, end - 1, 1, 0, end, 0, positions, torch.arange(held))
    none = torch.empty(0, *planes.k.shape[::2], dtype=planes.k.dtype)
    started = time.perf_counter()
    out: torch.Tensor = ops.attention(q, KVRows(none, none), planes, PagedBatch((segment,)), scale=layer.scale)[0]
    return out, time.perf_counter() - started


def run(context: Context) -> Finding:
    sizes = context.pick(FULL, QUICK)
    model = next((x for x in context.spec.layers if x.span.kind is SpanKind.SLIDING), context.spec.layers[0])
    plan = Plan(
        tuple(context.lengths_of(sizes.lengths, sizes.steps)),
        sizes.steps,
        context.window or sizes.window,
        (model.num_heads, model.num_kv_heads),
        model.head_dim,
        context.spec.hidden_size,
    )
    return measure(context, plan)


@torch.inference_mode()
def measure(context: Context, plan: Plan) -> Finding:
    weights = context.weights
    ops, layer = weights.ops, Layer(plan, context.seed, weights.decoder.dtype)
    window = Span.sliding(plan.window)
    stores: dict[str, Any] = {
        "ring": Stored(layer, ops, window),
        "full storage": Stored(layer, ops, window, keeps_all=True),
        "shift-left": Shifted(layer, ops),
        "re-computation": Recomputed(layer, ops),
        _FULL: Stored(layer, ops, Span.full()),
    }
    rows, done = list[dict[str, Any]](), 0
    worst = dict.fromkeys(FOUR, 0.0)
    for length in context.track("ring-layer", plan.lengths):
        for first in range(done, length, _CHUNK):
            for store in stores.values():
                store.feed(first, min(first + _CHUNK, length))
        done = length + plan.steps
        times, kernel = _write(layer, stores, length, worst)
        rows += [
            {
                "length": length,
                "storage": name,
                "held": stores[name].held_bytes / 2**20,
                "time per token": 1e6 * statistics.median(times[name]),
                "fastest": 1e6 * min(times[name]),
                "attention alone": 1e6 * min(kernel[name]),
            }
            for name in stores
        ]
    return _finding(plan, rows, worst, layer.inputs.dtype)


def _write(
    layer: Layer, stores: dict[str, Any], length: int, worst: dict[str, float]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """One token at a time, in turns: seconds of steps, and of attention in them. Keeps the largest difference of each
    storage to the dense reference."""
    times: dict[str, list[float]] = {name: [] for name in stores}
    kernel: dict[str, list[float]] = {name: [] for name in stores}
    names = list(stores)
    for i in range(layer.plan.steps):
        at, found = length + i, dict[str, torch.Tensor]()
        for name in names[i % len(names) :] + names[: i % len(names)]:
            feed: Callable[[int, int], torch.Tensor] = stores[name].feed
            times[name].append(seconds(lambda: found.update({name: feed(at, at + 1)})))  # noqa: B023
            kernel[name].append(stores[name].attention_s)
        wanted = _reference(layer, at)
        for name in FOUR:
            worst[name] = max(worst[name], float((found[name][0].float() - wanted).abs().max()))
    return times, kernel


def _reference(layer: Layer, at: int) -> torch.Tensor:
    """Output [Hq, D] at position ``at``, dense and in float32, over keys and values of the layer's dtype."""
    first = max(0, at + 1 - layer.plan.window)
    q = layer.queries(layer.inputs[at : at + 1])[0]
    k, v = (rows.transpose(0, 1) for rows in layer.rows(layer.inputs[first : at + 1]))
    folded = q.unflatten(0, (layer.plan.heads[1], -1))
    mask = torch.ones(folded.shape[1], k.shape[1], dtype=torch.bool)
    return dense_attention(folded, k, v, mask, scale=layer.scale)[0].flatten(0, 1)


def _finding(plan: Plan, rows: list[dict[str, Any]], worst: dict[str, float], dtype: torch.dtype) -> Finding:
    by = {(row["length"], row["storage"]): row for row in rows}
    lengths = [n for n in plan.lengths if n >= plan.window] or [plan.lengths[-1]]
    first, last = lengths[0], lengths[-1]
    ring, whole = by[last, "ring"], by[last, _FULL]
    # Random values are about 1 in size and a window's mean far below; bfloat16 rounds at 2^-9 of a number.
    bound = 0.01 if dtype == torch.bfloat16 else 1e-4
    same = max(worst.values()) < bound
    growth, others = ring["attention alone"] / by[first, "ring"]["attention alone"], whole["attention alone"]
    flat = ring["held"] == by[first, "ring"]["held"] if first > plan.window else True
    verdict = holds(same, flat, growth < _GROWTH)
    sentence = (
        f"From {first} to {last} tokens attention in the ring goes from {by[first, 'ring']['attention alone']:.0f} to "
        f"{ring['attention alone']:.0f} µs a token while it holds {ring['held']:.2f} MiB; full attention takes "
        f"{others:.0f} µs in the end, and full storage holds {by[last, 'full storage']['held']:.1f} MiB for the "
        f"ring's answer. A whole step takes {ring['fastest']:.0f} µs with the ring, "
        f"{by[last, 'shift-left']['fastest']:.0f} with shift-left and {by[last, 're-computation']['fastest']:.0f} "
        f"with re-computation. The four differ from the dense reference by at most {max(worst.values()):.1e}."
    )
    names = (*FOUR, _FULL)
    marks = ((float(plan.window), f"W = {plan.window}"),)
    kernel = Plot(
        "ring-layer-attention",
        "One layer: time of attention alone",
        Axis("length", "tokens", 2),
        Axis("fastest", "µs", 10),
        {name: [(n, by[n, name]["attention alone"]) for n in plan.lengths] for name in names},
        marks=marks,
        reading=f"From {first} to {last} tokens full attention takes "
        f"{others / by[first, _FULL]['attention alone']:.1f} times as long, the window {growth:.2f} times.",
    )
    times = Plot(
        "ring-layer-time",
        "One layer: time of a whole step",
        Axis("length", "tokens", 2),
        Axis("fastest", "µs"),
        {name: [(n, by[n, name]["fastest"]) for n in plan.lengths] for name in names},
        marks=marks,
        reading=f"Making the window's keys and values anew costs "
        f"{by[last, 're-computation']['fastest'] / ring['fastest']:.1f} times a step of the ring at {last} tokens.",
    )
    memory = Plot(
        "ring-layer-memory",
        "One layer: bytes held",
        Axis("length", "tokens", 2),
        Axis("memory", "MiB", 2),
        {name: [(n, by[n, name]["held"]) for n in plan.lengths] for name in names},
        marks=marks,
        reading=f"The ring stays at {ring['held']:.2f} MiB; full storage grows to "
        f"{by[last, 'full storage']['held']:.1f} MiB although the layer never looks at most of it.",
    )
    method = (
        f"One layer with random weights, {plan.heads[0]} query and {plan.heads[1]} key heads of {plan.dim}, window "
        f"{plan.window}, {str(dtype).removeprefix('torch.')}; {plan.steps} tokens written after each length, all "
        "storages in turns; each step makes query, key and value, stores and attends. The fastest step is shown "
        "because other work on the machine can only slow one down. Ring and full storage run on the engine's page "
        "tables, whose Python costs some of the time; in the engine a step pays it once for all layers."
    )
    return Finding("ring-layer", verdict, sentence, rows, _UNITS, [kernel, times, memory], method)


EXPERIMENT = Experiment(
    "ring-layer",
    "The ring in one layer",
    "A ring of fixed size gives what full storage gives; its memory and its time per token do not grow with the "
    "length.",
    _EXPLANATION,
    run,
)
