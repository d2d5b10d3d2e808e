"""One long answer, written token by token: memory and time as it grows."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

from sash.lab.context import Context
from sash.lab.experiment import Axis, Experiment, Finding, NotApplicable, Plot, Point, holds, thin
from sash.lab.session import Session
from sash.spec.sampling import SamplingParams

_EXPLANATION = """
The lengths so far were reached by reading. Here the model writes the whole way itself, one token after the other from
a short prompt, through the engine as everybody uses it. If anything piled up, it would show here: the ring is
overwritten many times over. In the end, full storage reads what was written and says what it would have written in
the last steps.
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """``tokens`` are written after a prompt of ``prompt``; the books are looked at every ``every``, and the last
    ``checked`` are compared with full storage."""

    tokens: int
    prompt: int = 16
    every: int = 100
    checked: int = 64


def run(context: Context) -> Finding:
    return measure(context, context.pick(Plan(20_000), Plan(1_000, checked=16)))


def measure(context: Context, plan: Plan) -> Finding:
    if not context.window:
        raise NotApplicable("no layer of this model has a window.")
    tokens = min(plan.tokens, context.spec.max_position - plan.prompt)
    prompt = context.ids(plan.prompt)
    llm = context.llm(max_model_len=plan.prompt + tokens, max_num_seqs=1)
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    rows: list[dict[str, Any]] = []
    written: list[int] = []
    times: list[float] = []
    last = time.perf_counter()
    for delta in llm.stream(prompt, params):
        written += delta.outputs[0].token_ids
        now = time.perf_counter()
        times.append(now - last)
        if len(times) == plan.every or len(written) == tokens:
            rows.append(_row(llm.stats(), plan.prompt + len(written), times))
            times = []
            context.report("ring-long", len(written), tokens)
        last = time.perf_counter()
    same = _same_as_stored(context, prompt + written, plan.checked)
    return _finding(context, plan, rows, same)


def _row(stats: dict[str, Any], length: int, times: list[float]) -> dict[str, Any]:
    pools = {pool["name"]: pool["peak_pages"] * pool["page_bytes"] / 2**20 for pool in stats["pools"]}
    window = sum(size for name, size in pools.items() if name.startswith("window"))
    slid = sum(pool["slid_pages"] for pool in stats["pools"])
    return {
        "length": length,
        "window rows": window,
        "other rows": sum(pools.values()) - window,
        "pages overwritten": slid,
        "time per token": 1000 * statistics.median(times),
        "fastest": 1000 * min(times),
    }


def _line(rows: list[dict[str, Any]], column: str) -> list[Point]:
    return thin([(float(row["length"]), float(row[column])) for row in rows])


def _same_as_stored(context: Context, text: list[int], checked: int) -> float:
    """Share of the last tokens that full storage writes too, given the text before each."""
    session = Session(context.weights, "full storage", len(text))
    token = session.feed(text[:-checked])
    same = 0
    for wanted in text[-checked:]:
        same += token == wanted
        token = session.feed([wanted])
    return same / checked


def _finding(context: Context, plan: Plan, rows: list[dict[str, Any]], same: float) -> Finding:
    window, last = context.window, rows[-1]
    full = [row for row in rows if row["length"] >= window + 16] or rows
    flat = len({row["window rows"] for row in full}) == 1
    tenth = max(1, len(full) // 10)
    early = statistics.median(row["fastest"] for row in full[:tenth])
    late = statistics.median(row["fastest"] for row in full[-tenth:])
    has_full = any(not layer.span.bounded for layer in context.spec.layers)
    verdict = holds(flat, same >= 0.95)
    sentence = (
        f"After {last['length']} tokens the window layers hold {last['window rows']:.2f} MiB, as they did at "
        f"{full[0]['length']}; {last['pages overwritten']} pages were overwritten in place on the way. The fastest "
        f"tokens take {early:.2f} ms at the beginning and {late:.2f} ms at the end"
        + (f", when a step reads {last['other rows']:.1f} MiB of the full layers' rows as well" if has_full else "")
        + f". Full storage would have written {100 * same:.0f} % of the last {plan.checked} tokens alike."
    )
    memory = Plot(
        "ring-long-memory",
        "One long answer: bytes held",
        Axis("length", "tokens"),
        Axis("memory", "MiB"),
        {
            "window layers": _line(rows, "window rows"),
            **({"full layers": _line(rows, "other rows")} if has_full else {}),
        },
        reading=f"The window layers' line is flat at {last['window rows']:.2f} MiB from {full[0]['length']} tokens on"
        + (f"; the full layers reach {last['other rows']:.1f} MiB." if has_full else "."),
    )
    speed = Plot(
        "ring-long-time",
        "One long answer: time per token",
        Axis("length", "tokens"),
        Axis("time per token", "ms"),
        {
            "median of 100": _line(rows, "time per token"),
            "fastest of 100": _line(rows, "fastest"),
        },
        reading=f"From the first tenth to the last the fastest of 100 goes from {early:.2f} to {late:.2f} ms.",
    )
    table = rows[:: max(1, len(rows) // 8)]
    units = {"length": "tokens", "window rows": "MiB", "other rows": "MiB", "pages overwritten": "pages"}
    method = (
        f"A prompt of {plan.prompt} tokens, then {last['length'] - plan.prompt} greedy tokens by the engine; bytes of "
        f"pages and times by {plan.every} tokens. Greedy text of a small base model soon repeats itself, which "
        "changes nothing about memory and time."
    )
    return Finding(
        "ring-long",
        verdict,
        sentence,
        [*table, *([] if table[-1] is last else [last])],
        units | {"time per token": "ms", "fastest": "ms"},
        [memory, speed],
        method,
    )


EXPERIMENT = Experiment(
    "ring-long",
    "A long answer through the ring",
    "However long an answer gets, its window layers hold the same bytes, and the text is the one that full storage "
    "gives.",
    _EXPLANATION,
    run,
)
