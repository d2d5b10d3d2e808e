"""Receptive field: how far a token's influence reaches through stacked windows, by distance and depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sash.lab.context import Context, Weights, all_full, all_windows, windows_of
from sash.lab.draw import number
from sash.lab.experiment import Axis, Experiment, Finding, NotApplicable, Plot, holds
from sash.lab.probe import trace
from sash.lab.toy import toy_spec, toy_weights
from sash.spec.model import ModelSpec
from sash.spec.span import Span

_EXPLANATION = """
A window layer sees W tokens, but layers are stacked: what a layer sees was written by the layer below, which had seen
W tokens itself. So news can hop from window to window, and after L layers it may come from L x (W - 1) places back.
It is often said that such a model therefore "sees" L x W tokens. This is an upper bound, like the number of people
that a rumour could reach; what counts is how much of it arrives.

To measure it, one token at the start of a text is replaced by others, and the change is followed through all layers
to all later places: its size beside the size of what stands there. A **pure** stack has a window in every layer, a
**hybrid** one some full layers, and a **full** stack only those.
"""
_TOY_EXPLANATION = """
First on stacks with random weights, which nobody has trained to pass anything on: what does the stacking itself do?
"""
_CLAIM = (
    "Through L windows nothing comes from beyond L x (W - 1), and with strength from far less; full layers reach "
    "everything."
)
_LEAST = 0.01  # of the influence on the next place


@dataclass(frozen=True, slots=True)
class Plan:
    """A text of ``length`` tokens, windows of ``window``, and ``changes`` tokens tried in the place of one."""

    length: int
    window: int
    changes: int


@dataclass(frozen=True, slots=True)
class Influence:
    """Relative change [layers, distances] float32; distance 0 is the replaced token's own place."""

    change: torch.Tensor

    @property
    def farthest(self) -> list[int]:
        """After each layer, the largest distance with any change at all."""
        return [int(row.nonzero().max()) if bool(row.any()) else 0 for row in self.change]

    @property
    def effective(self) -> list[int]:
        """After each layer, the largest distance with a change of at least ``_LEAST`` of that at distance 1."""
        return [int((row >= _LEAST * row[1]).nonzero().max()) if bool(row[1] > 0) else 0 for row in self.change]


@torch.inference_mode()
def influence(weights: Weights, ids: list[int], spec: ModelSpec, place: int, others: list[int]) -> Influence:
    """Replace the token at ``place`` by each of ``others``; the mean relative change after each layer."""

    def hidden(tokens: list[int]) -> torch.Tensor:
        out = torch.empty(len(spec.layers), len(tokens) - place, spec.hidden_size)
        trace(weights, tokens, spec, watch=lambda i, x: out[i].copy_(x[place:]))
        return out

    plain = hidden(ids)
    total = torch.zeros(plain.shape[:2])
    for other in others:
        changed = hidden([*ids[:place], other, *ids[place + 1 :]])
        total += (changed - plain).norm(dim=-1) / plain.norm(dim=-1)
    return Influence(total / len(others))


def run(context: Context) -> Finding:
    return measure(context, context.pick(Plan(1400, 64, 3), Plan(700, 32, 1)))


def measure(context: Context, plan: Plan) -> Finding:
    if not context.window:
        raise NotApplicable("no layer of this model has a window.")
    spec = context.spec
    stacks = {
        "pure": all_windows(spec, plan.window),
        "hybrid": windows_of(spec, plan.window),
        "full": all_full(spec),
    }
    ids = context.ids(plan.length)
    # The first token may be a start mark that every text has; the one after it is the text's first.
    place = 1
    others = [token for token in dict.fromkeys(ids[plan.length // 2 :]) if token != ids[place]][: plan.changes]
    found = {
        name: influence(context.exact, ids, stacks[name], place, others) for name in context.track("reach", stacks)
    }
    method = (
        f"float32 without quantisation, {plan.length} tokens, windows set to {plan.window} so that the bound lies "
        f"within the text; the text's first token replaced by {len(others)} others; mean relative change of the "
        "residual stream."
    )
    return _finding("reach", "the real model", plan.window, found, method)


def run_toy(context: Context) -> Finding:
    return measure_toy(context, context.pick(Plan(320, 16, 8), Plan(160, 8, 4)))


def measure_toy(context: Context, plan: Plan, depth: int = 16) -> Finding:
    window, full = Span.sliding(plan.window), Span.full()
    stacks = {
        "pure": toy_spec((window,) * depth),
        "hybrid": toy_spec(tuple(full if i % 4 == 3 else window for i in range(depth))),
        "full": toy_spec((full,) * depth),
    }
    source = torch.Generator().manual_seed(context.seed)
    ids = torch.randint(stacks["pure"].vocab_size, (plan.length + plan.changes,), generator=source).tolist()
    others = [(token + 1 + i) % stacks["pure"].vocab_size for i, token in enumerate([ids[0]] * plan.changes)]
    found = {
        name: influence(toy_weights(spec, context.seed), ids[: plan.length], spec, 0, others)
        for name, spec in context.track("reach-toy", list(stacks.items()))
    }
    method = (
        f"{depth} layers with random weights (seed {context.seed}), hidden size 64, windows of {plan.window}, every "
        f"fourth layer of the hybrid stack full; {plan.length} random tokens, the first replaced by {len(others)} "
        "others."
    )
    return _finding("reach-toy", "a random stack", plan.window, found, method)


def _finding(name: str, what: str, window: int, found: dict[str, Influence], method: str) -> Finding:
    pure = found["pure"]
    depth, distances = pure.change.shape
    bounds = [min((i + 1) * (window - 1), distances - 1) for i in range(depth)]
    inside = all(far <= bound for far, bound in zip(pure.farthest, bounds, strict=True))
    bound, far, effective = depth * (window - 1), pure.farthest[-1], pure.effective[-1]
    last = distances - 1
    arrives = {label: float(it.change[-1, last]) for label, it in found.items()}
    verdict = holds(inside, effective < bound / 2, arrives["hybrid"] > 0, arrives["pure"] == 0 or last <= bound)
    rows: list[dict[str, Any]] = [
        {
            "layers": i + 1,
            "L x (W - 1)": (i + 1) * (window - 1),
            "farthest, pure": pure.farthest[i],
            **{f"effective, {label}": it.effective[i] for label, it in found.items()},
        }
        for i in range(depth)
    ]
    sentence = (
        f"In {what} with {depth} windows of {window}, nothing at all arrives beyond {far} tokens (L x (W - 1) is "
        f"{bound}), and less than 1 % of the influence on the next token beyond {effective}: {effective / window:.1f} "
        f"W instead of {bound / window:.1f} W. At a distance of {last} the change is {number(arrives['pure'])} of "
        f"what stands there in the pure stack, {number(arrives['hybrid'])} in the hybrid and "
        f"{number(arrives['full'])} in the full one."
    )
    thin = sorted({min(round(1.07**i), last) for i in range(200)} | set(range(1, min(33, last))))
    by_distance = Plot(
        f"{name}-distance",
        f"Influence of one token after all layers, {what}",
        Axis("distance", "tokens", 2),
        Axis("change", "share of what stands there", 10),
        {label: [(d, float(it.change[-1, d])) for d in thin if it.change[-1, d] > 0] for label, it in found.items()},
        marks=((float(window), f"W = {window}"), *(((float(bound), "L x (W - 1)"),) if bound < last else ())),
        reading=f"The pure stack's line falls {_orders(pure, window, far):.0f} powers of ten between W and its last "
        f"point at {far}; full layers carry influence to any distance.",
    )
    by_depth = Plot(
        f"{name}-depth",
        f"Reach by depth, {what}",
        Axis("depth", "layers"),
        Axis("distance", "tokens"),
        {
            "bound L x (W - 1), pure": [(i + 1.0, float((i + 1) * (window - 1))) for i in range(depth)],
            "any change, pure": [(i + 1.0, float(d)) for i, d in enumerate(pure.farthest)],
            "1 % of the influence, pure": [(i + 1.0, float(d)) for i, d in enumerate(pure.effective)],
        },
        reading=f"The bound grows by W - 1 with every layer; what arrives with 1 % of its strength comes from at most "
        f"{max(pure.effective)} tokens back.",
    )
    units = {"layers": "number", "L x (W - 1)": "tokens", "farthest, pure": "tokens"}
    units |= {f"effective, {label}": "tokens" for label in found}
    return Finding(name, verdict, sentence, rows, units, [by_distance, by_depth], method)


def _orders(it: Influence, window: int, far: int) -> float:
    """Powers of ten between the change at W - 1 and at the farthest place."""
    return float(torch.log10(it.change[-1, window - 1] / it.change[-1, far]))


EXPERIMENT = Experiment(
    "reach",
    "How far news travels in a real model",
    _CLAIM,
    "The same on the real model, whose weights have learned to pass things on.",
    run,
)
TOY = Experiment(
    "reach-toy",
    "How far news travels through stacked windows",
    _CLAIM,
    _EXPLANATION.rstrip() + "\n" + _TOY_EXPLANATION,
    run_toy,
)
