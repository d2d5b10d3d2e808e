"""Window sizes from 64 to 4096: what quality and memory become, together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sash.engine.llm import LLM
from sash.lab.context import Context, all_full, all_windows, windows_of
from sash.lab.experiment import Axis, Experiment, Finding, NotApplicable, Plot, holds
from sash.spec.errors import SashError
from sash.spec.model import ModelSpec
from sash.spec.sampling import SamplingParams

_EXPLANATION = """
How large should a window be? The window of a model's config can be overridden, so the same weights can be run with
many. For each, the model reads the same text and is asked how surprised it was by every token (**perplexity**, lower
is better), and the bytes of its cache are counted. Perplexity is taken over the end of the text, where the largest
window has slid, too.

A model has been trained with one window. With a smaller one it misses what it learned to use; with a larger one it
sees tokens at distances it has never met in that layer. So this is a picture of this model, and no proof of what
other training would give.
"""

_UNITS = {
    "window": "tokens",
    "perplexity": "equally likely tokens",
    "perplexity, all": "equally likely tokens",
    "window rows": "MiB",
    "all rows": "MiB",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Windows to try on a text of ``length`` tokens."""

    windows: tuple[int, ...]
    length: int


def run(context: Context) -> Finding:
    return measure(context, context.pick(Plan((64, 128, 256, 512, 1024, 2048, 4096), 5632), Plan((64, 512), 1088)))


def measure(context: Context, plan: Plan) -> Finding:
    length = max(plan.length, 5 * max(context.windows, default=0) // 4)
    if context.spec.max_position < length:
        raise NotApplicable(f"the model's context is shorter than the text of {length} tokens.")
    trained = context.window
    sizes = sorted({*(context.windows or plan.windows), *([trained] if trained and trained < length else [])})
    ids = context.ids(length)
    rows = [_row(context, w, ids, sizes[-1]) for w in context.track("window-sweep", [*sizes, 0])]
    return _finding(context, length, rows)


def _spec(context: Context, window: int) -> ModelSpec:
    """``window`` in the sliding layers, or in all layers of a model that has none; 0 is full attention."""
    if not window:
        return all_full(context.spec)
    return windows_of(context.spec, window) if context.window else all_windows(context.spec, window)


def _row(context: Context, window: int, ids: list[int], first: int) -> dict[str, Any]:
    llm = context.llm(_spec(context, window), max_model_len=len(ids), max_num_seqs=1)
    scores = surprise(llm, ids)
    pools = llm.stats()["pools"]
    held = {pool["kind"]: pool["peak_pages"] * pool["page_bytes"] / 2**20 for pool in pools}
    return {
        "window": window or "none",
        "perplexity": math.exp(sum(scores[first:]) / len(scores[first:])),
        "perplexity, all": math.exp(sum(scores) / len(scores)),
        "window rows": held.get("sliding", 0.0),
        "all rows": sum(held.values()),
    }


def surprise(llm: LLM, ids: list[int]) -> list[float]:
    """-log p of tokens 1 …, in nats."""
    [out] = llm.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=0))
    if out.outputs[0].finish_reason != "length":
        raise SashError(f"a text could not be scored: {out.outputs[0].error}")
    return [-next(iter(entry.values())).logprob for entry in out.prompt_logprobs or [] if entry]


def _finding(context: Context, length: int, rows: list[dict[str, Any]]) -> Finding:
    *sized, full = rows
    trained = context.window
    best = min(rows, key=lambda row: row["perplexity"])
    own = next((row for row in sized if row["window"] == trained), full)
    small = sized[0]
    best_window = "no window" if best["window"] == "none" else f"window {best['window']}"
    verdict = holds(
        own["perplexity"] <= 1.02 * best["perplexity"],
        small is own or small["perplexity"] > own["perplexity"],
        all(a["all rows"] <= b["all rows"] for a, b in pairwise(rows)),
    )
    named = f"the trained window of {trained}" if trained else "full attention, as trained,"
    sentence = (
        f"With {named} perplexity is {own['perplexity']:.2f} for {own['all rows']:.1f} MiB; a window of "
        f"{small['window']} gives {small['perplexity']:.2f} for {small['all rows']:.1f} MiB, and the best seen is "
        f"{best['perplexity']:.2f} ({best_window}) for {best['all rows']:.1f} MiB."
    )
    lines = [(float(row["window"]), row) for row in sized]
    marks = ((float(trained), f"trained: {trained}"),) if trained else ()
    quality = Plot(
        "sweep-quality",
        "Quality by window",
        Axis("window", "tokens", 2),
        Axis("perplexity", "equally likely tokens", 10),
        {
            "this window": [(w, row["perplexity"]) for w, row in lines],
            "no window": [(w, full["perplexity"]) for w, _ in lines],
        },
        marks=marks,
        reading=_quality(small, own if trained else sized[-1], sized[-1]),
    )
    memory = Plot(
        "sweep-memory",
        "Memory by window",
        Axis("window", "tokens", 2),
        Axis("KV memory of the text", "MiB"),
        {
            "this window": [(w, row["all rows"]) for w, row in lines],
            "no window": [(w, full["all rows"]) for w, _ in lines],
        },
        marks=marks,
        reading=f"The bytes of its layers grow with the window, from {small['window rows']:.1f} MiB at "
        f"{small['window']} to {sized[-1]['window rows']:.1f} at {sized[-1]['window']}, for a text of {length} tokens.",
    )
    method = (
        f"A text of {length} tokens, scored by the engine at its default precision; perplexity of the tokens after "
        f"{sized[-1]['window']} and of all; bytes of the pages held at the end. {'Sliding' if trained else 'All'} "
        f"layers get the window{', the full layers stay full' if trained else ''}."
    )
    return Finding("window-sweep", verdict, sentence, rows, _UNITS, [quality, memory], method)


def _quality(small: dict[str, Any], own: dict[str, Any], last: dict[str, Any]) -> str:
    text = (
        f"From a window of {small['window']} to {own['window']} perplexity goes from {small['perplexity']:.2f} to "
        f"{own['perplexity']:.2f}"
    )
    if last is own:
        return text + "."
    worse = last["perplexity"] > 1.1 * own["perplexity"]
    return f"{text}; beyond, at {last['window']}, it is {last['perplexity']:.2f}" + (
        ": a layer is lost at distances that it never met in training." if worse else "."
    )


EXPERIMENT = Experiment(
    "window-sweep",
    "How large a window",
    "A model works best with the window it was trained with: smaller ones cost quality, larger ones only memory.",
    _EXPLANATION,
    run,
)
