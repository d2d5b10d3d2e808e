"""The fourth myth: a fact told long ago, asked for by models with and without full layers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from sash.lab.context import Context, all_full, all_windows
from sash.lab.experiment import Axis, Experiment, Finding, NotApplicable, Plot, holds
from sash.spec.sampling import SamplingParams

_EXPLANATION = """
"After L layers of windows the model sees L x W tokens, so nothing is lost." The chapters on reach have shown how
little comes through. Here is what that means for a fact: a number is told at the start, then comes other text, then
the number is asked for. The **pure** stack is the same model with its window in every layer; the **hybrid** is the
model as it is; the **full** one has no window at all.
"""
_DIGITS = 5
_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


@dataclass(frozen=True, slots=True)
class Plan:
    """Windows between the number and the question, and numbers tried at each distance."""

    distances: tuple[float, ...]
    trials: int


def run(context: Context) -> Finding:
    return measure(context, context.pick(Plan((0.25, 0.5, 0.875, 1.5, 2, 4), 8), Plan((0.25, 1.5), 3)))


def measure(context: Context, plan: Plan) -> Finding:
    window = context.window
    if not window:
        raise NotApplicable("no layer of this model has a window.")
    distances = context.in_windows(plan.distances, 128)
    numbers = random.Random(context.seed)
    asked = {
        d: [str(numbers.randrange(10 ** (_DIGITS - 1), 10**_DIGITS)) for _ in range(plan.trials)] for d in distances
    }
    prompts = [(d, number, prompt(context, number, d)) for d, group in asked.items() for number in group]
    longest = max(len(ids) for *_, ids in prompts) + 3 * _DIGITS
    kinds = {"full": all_full(context.spec), "hybrid": context.spec, "pure": all_windows(context.spec, window)}
    found: dict[str, dict[int, list[bool]]] = {}
    for kind, spec in context.track("myth-facts", list(kinds.items())):
        llm = context.llm(spec, max_model_len=longest, max_num_seqs=4)
        params = SamplingParams(max_tokens=2 * _DIGITS, temperature=0.0)
        outs = llm.generate([ids for *_, ids in prompts], params)
        found[kind] = {d: [] for d in distances}
        for (d, number, _), out in zip(prompts, outs, strict=True):
            found[kind][d].append(number in out.outputs[0].text)
    return _finding(
        window, plan, {kind: {d: 100 * sum(x) / len(x) for d, x in by.items()} for kind, by in found.items()}
    )


def prompt(context: Context, number: str, distance: int) -> list[int]:
    """The number, ``distance`` tokens of filler, the question."""
    told = f"The pass key is {number}. Remember it. {number} is the pass key.\n"
    asking = "\nWhat is the pass key? The pass key is"
    # Encoded apart, so that the distance is exact; a start mark stays at the start only.
    first, second = context.tokenizer.encode(told), context.tokenizer.encode(asking)
    filler = context.tokenizer.encode(_FILLER * (1 + distance // 8))
    marks = 1 if context.spec.bos_token_id is not None and first[:1] == [context.spec.bos_token_id] else 0
    return [*first, *filler[marks : marks + distance], *second[marks:]]


def _finding(window: int, plan: Plan, shares: dict[str, dict[int, float]]) -> Finding:
    distances = list(shares["pure"])
    near, far = [d for d in distances if d < window - 32], [d for d in distances if d >= window]

    def mean(kind: str, where: list[int]) -> float:
        return sum(shares[kind][d] for d in where) / len(where) if where else 0.0

    rows: list[dict[str, Any]] = [{"distance": d, **{kind: shares[kind][d] for kind in shares}} for d in distances]
    sentence = (
        f"Within the window of {window} the pure stack finds {mean('pure', near):.0f} % of the numbers and the hybrid "
        f"{mean('hybrid', near):.0f} %; beyond it the pure stack finds {mean('pure', far):.0f} % and the hybrid "
        f"{mean('hybrid', far):.0f} %. With full attention in every layer these weights, trained with windows, find "
        f"{mean('full', far):.0f} % there."
    )
    plot = Plot(
        "myth-facts",
        "A number told earlier, asked for now",
        Axis("distance", "tokens", 2),
        Axis("numbers found", "% of trials"),
        {kind: [(float(d), share) for d, share in by.items()] for kind, by in shares.items()},
        marks=((float(window), f"W = {window}"),),
        reading=f"The pure stack falls from {mean('pure', near):.0f} to {mean('pure', far):.0f} % at the window's "
        f"edge; full layers still find {mean('hybrid', far):.0f} %.",
    )
    return Finding(
        "myth-facts",
        holds(mean("pure", near) >= 50, mean("pure", far) <= 10, mean("hybrid", far) >= 40),
        sentence,
        rows,
        {"distance": "tokens", **dict.fromkeys(shares, "% of trials")},
        [plot],
        f"{plan.trials} numbers of {_DIGITS} digits at each distance, greedy answers of {2 * _DIGITS} tokens; a "
        "number counts as found if it stands in the answer. The pure stack was not trained as one: it shows what "
        "windows alone can carry with these weights, and no training can carry more than the reach allows.",
    )


EXPERIMENT = Experiment(
    "myth-facts",
    "Myth 4: stacked windows remember distant facts",
    "A stack of windows alone forgets a fact told more than a window ago; a few full layers keep it.",
    _EXPLANATION,
    run,
)
