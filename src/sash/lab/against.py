"""How far a model with windows is from the same model without, by length and layer; and from what it should be."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from sash.lab.context import Context, Weights, all_full
from sash.lab.experiment import Axis, Experiment, Finding, NotApplicable, Plot, holds
from sash.lab.probe import trace
from sash.ops.attention_reference import dense_attention
from sash.spec.model import LayerSpec, ModelSpec

_EXPLANATION = """
People check an implementation of windows by comparing it with full attention: the mean squared error (MSE) should be
small. That is right only for texts shorter than the window, where both see the same and the error must be **zero**.
Beyond W they compute different things on purpose, and an error of zero would mean that the window is not there. What
a window model must agree with at every length is a plain computation with the window as a mask: every score computed,
every score outside the window thrown away.

So the same text runs through the same weights three times: with the model's windows in the engine's kernels, with
full attention in every layer, and with the plain masked computation. The residual stream (what one layer hands to the
next) is compared after every layer, and in the end the token that the model thinks most likely.
"""
_ROWS = 64  # logits at once


@dataclass(frozen=True, slots=True)
class Plan:
    """A text of ``windows`` windows; the likeliest tokens are compared at every ``every``-th place."""

    windows: int
    every: int


def run(context: Context) -> Finding:
    return measure(context, context.pick(Plan(8, 8), Plan(2, 16)))


@dataclass(frozen=True, slots=True)
class _Run:
    """The residual stream after each layer [layers, N, hidden], and the likeliest tokens at some places."""

    hidden: torch.Tensor
    best: torch.Tensor


def measure(context: Context, plan: Plan) -> Finding:
    window = context.window
    if not window:
        raise NotApplicable("no layer of this model has a window.")
    count = min(window * plan.windows, context.spec.max_position)
    ids, weights = context.ids(count), context.exact
    runs: dict[str, _Run] = {}
    for name in context.track("against", ("windows", "full", "masked")):
        spec = all_full(context.spec) if name == "full" else context.spec
        runs[name] = _run(weights, ids, spec, plan.every, dense=name == "masked")
    edges = [0, window]
    while edges[-1] < count:
        edges.append(min(2 * edges[-1], count))
    parts = list(pairwise(edges))
    rows: list[dict[str, Any]] = []
    for first, end in parts:
        places = slice(-(-first // plan.every), -(-end // plan.every))
        rows.append(
            {
                "positions": f"{first} to {end - 1}",
                "to full": _error(runs["windows"], runs["full"], first, end)[-1],
                "to masked": max(_error(runs["windows"], runs["masked"], first, end)),
                "token as full's": _agreement(runs["windows"], runs["full"], places),
                "token as masked's": _agreement(runs["windows"], runs["masked"], places),
            }
        )
    layers = {f"{a} to {b - 1}": _error(runs["windows"], runs["full"], a, b) for a, b in parts[1:]}
    masked = _error(runs["windows"], runs["masked"], 0, count)
    return _finding(
        context, rows, layers, masked, f"a text of {count} tokens, every {plan.every}th for the likeliest token"
    )


@torch.inference_mode()
def _run(weights: Weights, ids: list[int], spec: ModelSpec, every: int, dense: bool) -> _Run:
    hidden = torch.empty(len(spec.layers), len(ids), spec.hidden_size)
    out = trace(weights, ids, spec, attention=_dense if dense else None, watch=lambda i, x: hidden[i].copy_(x))
    chosen = out[::every]
    best = [weights.decoder.logits(chosen[i : i + _ROWS]).argmax(-1) for i in range(0, len(chosen), _ROWS)]
    return _Run(hidden, torch.cat(best))


def _dense(
    layer: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Every score, and a mask asked of the one rule."""
    count, bound = len(q), layer.span.bind(len(q))
    firsts = torch.tensor([bound.first(p) for p in range(count)])
    keys = torch.arange(count)
    mask = (keys <= keys[:, None]) & ((keys >= firsts[:, None]) | (keys < bound.sinks))
    repeat = layer.num_heads // layer.num_kv_heads
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    parts = []
    for head in range(layer.num_heads):
        i = head // repeat
        out, lse = dense_attention(q[head], k[i], v[i], mask, scale=layer.scale, softcap=layer.softcap)
        parts.append(out if sinks is None else out * torch.sigmoid(lse - sinks[head]).unsqueeze(-1))
    return torch.stack(parts, 1)


def _error(a: _Run, b: _Run, first: int, end: int) -> list[float]:
    """Mean squared difference after each layer, as a share of the mean square itself."""
    x, y = a.hidden[:, first:end], b.hidden[:, first:end]
    return [float(((p - q) ** 2).mean() / (q**2).mean()) for p, q in zip(x, y, strict=True)]


def _agreement(a: _Run, b: _Run, places: slice) -> float:
    return 100 * float((a.best[places] == b.best[places]).float().mean())


def _finding(
    context: Context, rows: list[dict[str, Any]], layers: dict[str, list[float]], masked: list[float], what: str
) -> Finding:
    below, beyond = rows[0], rows[-1]
    agreed, masked_agreed = beyond["token as full's"], min(row["token as masked's"] for row in rows)
    worst = max(row["to masked"] for row in rows)
    verdict = holds(below["to full"] < 1e-8, beyond["to full"] > 1e-6, worst < 1e-8)
    sentence = (
        f"Up to W = {context.window} the error to full attention is {_tiny(below['to full'])}; at positions "
        f"{beyond['positions']} it is {beyond['to full']:.2g}, and the likeliest token is full attention's in "
        f"{agreed:.0f} % of places. To the plain masked computation the error is at most {_tiny(worst)} at every "
        f"length and layer, and the tokens agree in {masked_agreed:.1f} %."
    )
    lines = {f"to full, positions {label}": list(enumerate(values, 1)) for label, values in layers.items()}
    plot = Plot(
        "against",
        "Error of a window model, by layer",
        Axis("layer", "number"),
        Axis("mean squared error", "share", 10),
        {
            label: [(float(i), max(value, 1e-16)) for i, value in points]
            for label, points in {**lines, "to masked, all positions": list(enumerate(masked, 1))}.items()
        },
        kind="lines",
        reading=f"Against full attention the error comes to {beyond['to full']:.2g} after the last layer; against the "
        f"masked computation it is {worst:.1e} at most. Only the second says whether the window is right.",
    )
    units = {
        "to full": "share",
        "to masked": "share",
        "token as full's": "% of places",
        "token as masked's": "% of places",
    }
    method = (
        f"float32 without quantisation, {what}; mean squared error of the residual stream as a share of its mean "
        "square, to full attention after the last layer and to the masked computation after the worst, over all "
        "positions of a range. The model was trained with windows, so full attention is not the better one here, "
        "only another."
    )
    return Finding("against", verdict, sentence, rows, units, [plot], method)


def _tiny(share: float) -> str:
    return "exactly 0" if share == 0 else f"{share:.0e} of the signal (rounding)"


EXPERIMENT = Experiment(
    "against",
    "Windows against full attention",
    "A window model equals full attention up to W and departs from it beyond, while it equals the masked computation "
    "always.",
    _EXPLANATION,
    run,
)
