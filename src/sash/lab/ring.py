"""The same model with its window rows stored in a ring, in full, shifted, or not at all."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sash.lab.context import Context
from sash.lab.experiment import Axis, Experiment, Finding, NotApplicable, Plot, holds
from sash.lab.session import STORAGES, Session
from sash.lab.timing import ms, seconds
from sash.spec.sampling import SamplingParams

_EXPLANATION = """
Now the whole model. Four ways to write the next token, which must all give the same one:

The **ring** is what sash does: each window layer has room for its window and overwrites the oldest page. **Full
storage** keeps every row of every layer and only masks what lies outside the window, which is what many programs do
with such models. **Shift-left** keeps exactly W rows, oldest first, and moves all of them one place for each new
token. **Re-computation** keeps nothing and reads the whole text again for every token.

The text is read up to each length, then tokens are written one at a time. The first three take turns token by token,
so that whatever else the machine does slows all of them alike, and all get the ring's token next, so that they can be
compared at every step.
"""
_MIB = 2**20
_RECOMPUTED = 8192


@dataclass(frozen=True, slots=True)
class Plan:
    """``steps`` tokens are written after each of ``lengths``; up to ``recomputed`` tokens are read again at each."""

    lengths: tuple[int, ...]
    steps: int
    recomputed: int


FULL = Plan((128, 512, 1024, 2048, 4096, 8192, 16_384, 19_936), 64, 3)
QUICK = Plan((128, 1024, 4096), 12, 1)


def run(context: Context) -> Finding:
    return measure(context, context.pick(FULL, QUICK))


def measure(context: Context, plan: Plan) -> Finding:
    if not context.window:
        raise NotApplicable("no layer of this model has a window.")
    lengths = context.lengths_of(plan.lengths, plan.steps)
    for a, b in pairwise(lengths):
        if b - a < plan.steps:
            raise NotApplicable(f"lengths {a} and {b} are nearer than the {plan.steps} tokens written after each.")
    longest = lengths[-1] + plan.steps
    text = context.ids(longest)
    sessions = {name: Session(context.weights, name, longest) for name in STORAGES}
    llm = context.llm(max_model_len=longest + 1, max_num_seqs=1)
    rows: list[dict[str, Any]] = []
    done: list[int] = []
    for length in context.track("ring", lengths):
        piece = text[len(done) : length]
        token = {name: session.feed(piece) for name, session in sessions.items()}["ring"]
        done += piece
        times, same = _write(sessions, token, plan.steps, done)
        again = None
        if length <= _RECOMPUTED:
            again = _recompute(llm, done, length, min(plan.recomputed, max(1, _RECOMPUTED // length)))
        for name, session in sessions.items():
            held = session.held_bytes()
            rows.append(_row(length, name, times[name], same[name], held))
        if again:
            rows.append(_row(length, "re-computation", *again, {}))
    return _finding(context, plan, rows)


def _write(
    sessions: dict[str, Session], token: int, steps: int, done: list[int]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Write tokens in turns; seconds of each step by storage, and the share of tokens that equal the ring's."""
    times: dict[str, list[float]] = {name: [] for name in sessions}
    equal = dict.fromkeys(sessions, 0)
    names = list(sessions)
    for i in range(steps):
        found: dict[str, int] = {}
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(seconds(lambda: found.update({name: sessions[name].feed([token])})))  # noqa: B023
        done.append(token)
        token = found["ring"]
        for name in names:
            equal[name] += found[name] == token
    return times, {name: n / steps for name, n in equal.items()}


def _recompute(llm: Any, done: list[int], length: int, tokens: int) -> tuple[list[float], float]:
    """Read the whole text again for each of the first ``tokens`` that were written after ``length``."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    times, equal = [], 0
    for i in range(tokens):
        prompt = done[: length + i]
        found: list[int] = []
        times.append(seconds(lambda: found.extend(llm.generate([prompt], params)[0].outputs[0].token_ids)))  # noqa: B023
        equal += found == done[length + i : length + i + 1]
    return times, equal / tokens


def _row(length: int, name: str, times: list[float], same: float, held: dict[str, int]) -> dict[str, Any]:
    window = sum(size for group, size in held.items() if group.startswith("window"))
    return {
        "length": length,
        "storage": name,
        "window rows": window / _MIB,
        "all rows": sum(held.values()) / _MIB,
        "time per token": ms(times),
        "fastest": ms(times, min),
        "tokens as the ring's": 100 * same,
    }


def _finding(context: Context, plan: Plan, rows: list[dict[str, Any]]) -> Finding:
    by = {(row["length"], row["storage"]): row for row in rows}
    lengths = sorted({row["length"] for row in rows})
    last, window = lengths[-1], context.window
    past = [by[n, "ring"]["window rows"] for n in lengths if n >= window + 16]
    ring, full = by[last, "ring"], by[last, "full storage"]
    again = [row for row in rows if row["storage"] == "re-computation"]
    same = all(row["tokens as the ring's"] == 100 for row in rows if row["storage"] != "re-computation")
    flat = len(set(past)) <= 1
    verdict = holds(same, flat, ring["all rows"] < full["all rows"] or last <= window)
    cost = (
        statistics.median(
            by[n, "shift-left"]["time per token"] / by[n, "ring"]["time per token"] for n in lengths if n >= window
        )
        if last >= window
        else 1.0
    )
    sentence = (
        f"At {last} tokens the ring's window layers hold {ring['window rows']:.2f} MiB, as they did at "
        f"{next((n for n in lengths if n >= window + 16), last)}, and full storage {full['window rows']:.1f} MiB; "
        f"with the full layers that is {ring['all rows']:.1f} against {full['all rows']:.1f} MiB. All three storages "
        f"wrote {'the same tokens' if same else 'NOT the same tokens'}. Shifting cost {100 * (cost - 1):+.0f} % time "
        f"per token beside the ring{_read_again(by, again)}."
    )
    stored = [by[last, name]["time per token"] for name in STORAGES]
    series = (*STORAGES, *(["re-computation"] if again else []))
    memory = Plot(
        "ring-memory",
        "KV memory of one request",
        Axis("length", "tokens", 2),
        Axis("rows of all layers", "MiB"),
        {name: [(n, by[n, name]["all rows"]) for n in lengths] for name in STORAGES},
        marks=((float(window), f"W = {window}"),),
        reading=f"Full storage holds {full['all rows'] / ring['all rows']:.1f} times what the ring holds at {last} "
        "tokens; what still grows under the ring are the model's full layers.",
    )
    speed = Plot(
        "ring-time",
        "Time to write one token",
        Axis("length", "tokens", 2),
        Axis("time per token (median)", "ms", 10),
        {name: [(row["length"], row["time per token"]) for row in rows if row["storage"] == name] for name in series},
        marks=((float(window), f"W = {window}"),),
        reading=f"At {last} tokens the three that store take {min(stored):.1f} to {max(stored):.1f} ms"
        f"{_read_again(by, again)}.",
    )
    units = {"length": "tokens", "window rows": "MiB", "all rows": "MiB", "time per token": "ms", "fastest": "ms"}
    method = (
        f"{plan.steps} tokens written after each length, the three storages in turns; medians and fastest steps. "
        f"Re-computation: up to {plan.recomputed} tokens, up to a length of {_RECOMPUTED}, where one token takes "
        "seconds; its products are cut otherwise, so near ties of bfloat16 may fall otherwise. Bytes are those of "
        "pages that hold rows."
    )
    return Finding("ring", verdict, sentence, rows, units | {"tokens as the ring's": "%"}, [memory, speed], method)


def _read_again(by: dict[tuple[int, str], dict[str, Any]], again: list[dict[str, Any]]) -> str:
    """What re-computation took at the longest length that it was tried at; nothing where it wasn't."""
    if not again:
        return ""
    length, took = again[-1]["length"], again[-1]["time per token"]
    ring = by[length, "ring"]["time per token"]
    return f", and reading {length} tokens again takes {took:.0f} ms a token instead of {ring:.1f}"


EXPERIMENT = Experiment(
    "ring",
    "The ring in a real model, and three other ways",
    "A ring writes the same tokens as full storage, past the window too, while the bytes of its window layers stay "
    "the same.",
    _EXPLANATION,
    run,
)
