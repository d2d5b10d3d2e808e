"""Attention weight by distance, read off the engine's own kernels: is it exactly zero from W on?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sash.kv.storage import KVRows
from sash.lab.context import Context, Weights
from sash.lab.experiment import Axis, Experiment, Finding, NotApplicable, Plot, holds, thin
from sash.lab.layer import OneLayer
from sash.lab.probe import Attended, in_hand, no_planes, trace
from sash.spec.model import LayerSpec
from sash.spec.span import Span, SpanKind

_EXPLANATION = """
The window is a promise: a token W or more places back has no part in the answer, not a small one, none. A mask that
is off by one, or a store that still holds a row it should have given up, would break it, and nobody would notice from
the text.

A kernel does not tell its weights, only the mix that comes out. But if every value is a marker (a vector with a
single 1 in a place of its own), then what comes out **is** the list of weights. So the queries and keys of the real
model are kept while it reads a text, and the engine's own kernels are asked again with markers for values: the kernel
that reads prompts, and the one that writes answers, whose keys lie in the ring of pages that the engine really uses.
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """``queries`` at the end of a text of ``windows`` windows."""

    queries: int
    windows: float


def run(context: Context) -> Finding:
    return measure(context, context.pick(Plan(64, 2.5), Plan(16, 1.5)))


def measure(context: Context, plan: Plan) -> Finding:
    window = context.window
    if not window:
        raise NotApplicable("no layer of this model has a window.")
    weights, count = context.weights, int(window * plan.windows) + plan.queries
    seen = _attended(weights, context.ids(count))
    layers = {_label(context.spec.layers[i]): (context.spec.layers[i], rows) for i, rows in seen.items()}
    lines: dict[str, list[float]] = {}
    for label, (layer, rows) in context.track("edge", list(layers.items())):
        first = count - plan.queries
        lines[f"{label}, reading"] = by_distance(_prefill_weights(weights, layer, rows, first), first)
        lines[f"{label}, writing"] = by_distance(_decode_weights(weights, layer, rows, first), first)
    return _finding(window, count, plan, lines)


def _finding(window: int, count: int, plan: Plan, lines: dict[str, list[float]]) -> Finding:
    rows: list[dict[str, Any]] = [
        {
            "kernel": label,
            "at W - 1": values[window - 1],
            "at W": values[window],
            "largest beyond": max(values[window:]),
            "share within W": sum(values[:window]) / sum(values),
        }
        for label, values in lines.items()
    ]
    windows = [row for row in rows if row["kernel"].startswith("window")]
    inside, beyond = min(r["at W - 1"] for r in windows), max(r["largest beyond"] for r in windows)
    verdict = holds(beyond == 0.0, inside > 0.0)
    sentence = (
        f"In window layers the largest weight at a distance of {window} or more is "
        f"{'exactly 0' if beyond == 0 else f'{beyond:.2e}, which must not be'}, and one step nearer, at {window - 1}, "
        f"it is {inside:.2e}: the window {'ends' if beyond == 0 < inside else 'does NOT end'} where it should, with W "
        "counting the token itself."
    )
    far = [r for r in rows if not r["kernel"].startswith("window")]
    if far:
        sentence += (
            f" A full layer gives {100 * (1 - far[0]['share within W']):.0f} % of its weight to what lies beyond."
        )
    last = max(d for r in windows for d, weight in enumerate(lines[r["kernel"]]) if weight > 0)
    plot = Plot(
        "edge",
        "Attention weight by distance",
        Axis("distance", "tokens back"),
        Axis("mean attention weight", "share of 1", 10),
        {label: thin([(float(d), w) for d, w in enumerate(values) if w > 0]) for label, values in lines.items()},
        marks=((float(window), f"W = {window}"),),
        reading=f"Weights of exactly zero are not drawn: the lines of window layers end at distance {last}.",
    )
    units = dict.fromkeys(("at W - 1", "at W", "largest beyond", "share within W"), "share of 1")
    method = (
        f"Queries and keys of one layer of each kind from a pass over {count} tokens; weights of the last "
        f"{plan.queries} queries in all heads; the table has means over queries and heads."
    )
    return Finding("edge", verdict, sentence, rows, units, [plot], method)


def _label(layer: LayerSpec) -> str:
    return "window layer" if layer.span.kind is SpanKind.SLIDING else f"{layer.span.describe()} layer"


def _attended(weights: Weights, ids: list[int]) -> dict[int, Attended]:
    """Queries and keys of the last layer of each kind."""
    last = {_label(layer): i for i, layer in enumerate(weights.spec.layers)}
    out: dict[int, Attended] = {}

    def keep(i: int, rows: Attended) -> None:
        if i in last.values():
            out[i] = Attended(*(x.clone() for x in (rows.q, rows.k, rows.v, rows.out)))

    trace(weights, ids, attended=keep)
    return out


def _markers(count: int, block: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Values [count, heads, dim] of which rows block · dim … have a 1 in a place of their own, all others none."""
    out = torch.zeros(count, heads, dim, dtype=dtype)
    rows = torch.arange(block * dim, min((block + 1) * dim, count))
    out[rows, :, rows - block * dim] = 1
    return out


def _prefill_weights(weights: Weights, layer: LayerSpec, rows: Attended, first: int) -> torch.Tensor:
    """Weights [queries, heads, keys] of queries ``first`` … as the kernel that reads prompts mixes."""
    count, parts = len(rows.k), []
    for block in range(-(-count // layer.v_head_dim)):
        v = _markers(count, block, layer.num_kv_heads, layer.v_head_dim, rows.v.dtype)
        out, _ = weights.ops.attention(
            *(rows.q, KVRows(rows.k, v), no_planes(rows.k, v), in_hand(layer.span, count)),
            scale=layer.scale,
            softcap=layer.softcap,
        )
        parts.append(out[first:].float())
    return torch.cat(parts, -1)[..., :count]


def _decode_weights(weights: Weights, layer: LayerSpec, rows: Attended, first: int) -> torch.Tensor:
    """The same, written one by one with keys in the engine's own pages."""
    count, parts = len(rows.k), []
    for block in range(-(-count // layer.v_head_dim)):
        v = _markers(count, block, layer.num_kv_heads, layer.v_head_dim, rows.v.dtype)
        one = _one_layer(weights, layer, count)
        pieces = [slice(0, first), *(slice(i, i + 1) for i in range(first, count))]
        how = (layer.scale, layer.softcap)
        steps = [one.step(rows.q[at], rows.k[at], v[at], *how) for at in pieces][1:]
        parts.append(torch.cat(steps).float())
    return torch.cat(parts, -1)[..., :count]


def _one_layer(weights: Weights, layer: LayerSpec, count: int) -> OneLayer:
    span: Span = layer.span
    return OneLayer(
        span, weights.ops, heads=layer.num_kv_heads, dim=layer.head_dim, dtype=weights.decoder.dtype, max_len=count
    )


def by_distance(found: torch.Tensor, first: int) -> list[float]:
    """Mean weight by distance, from weights [queries, heads, keys] of queries ``first`` …; distances that every
    query has."""
    mean = found.mean(1)
    return [sum(float(mean[i, first + i - d]) for i in range(len(mean))) / len(mean) for d in range(first + 1)]


EXPERIMENT = Experiment(
    "edge",
    "Where the window ends",
    "In a window layer a token W or more places back has a weight of exactly zero, and the token just inside has not.",
    _EXPLANATION,
    run,
)
