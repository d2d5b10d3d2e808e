"""What a batch brings: tokens a second by the number of requests that write at once."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from sash.lab.context import Context
from sash.lab.crowd import Crowd, Job
from sash.lab.experiment import Axis, Experiment, Finding, Plot, holds

_EXPLANATION = """
For one request, each token means reading all of the model's weights. For a batch they are read once for everybody's
next token. So a step with many requests takes longer than one with a single request, but not as many times longer.
"""
_GAIN = 1.5  # times the tokens of one request that the largest batch must bring at least


@dataclass(frozen=True, slots=True)
class Plan:
    """Batches of ``sizes`` requests write ``written`` tokens each behind prompts of ``prompt``, ``rounds`` times."""

    sizes: tuple[int, ...]
    written: int
    prompt: int
    rounds: int


def run(context: Context) -> Finding:
    return measure(context, context.pick(Plan((1, 2, 4, 8, 16, 32), 64, 64, 3), Plan((1, 4, 16), 24, 32, 1)))


def measure(context: Context, plan: Plan) -> Finding:
    times: dict[int, list[float]] = {size: [] for size in plan.sizes}
    turns = [s for i in range(plan.rounds) for s in (plan.sizes if i % 2 == 0 else plan.sizes[::-1])]
    for size in context.track("batch-speed", turns):
        times[size] += _write(context, plan, size)
    return _finding(plan, [_row(size, found, times[plan.sizes[0]]) for size, found in times.items()])


def _write(context: Context, plan: Plan, size: int) -> list[float]:
    """Seconds of the steps in which all of a batch write."""
    text = context.ids(size * plan.prompt)
    # Those whose prompt is read first have written some tokens when the last comes in.
    written = plan.written + size * plan.prompt // 512 + 1
    core = context.llm(max_model_len=plan.prompt + written, max_num_seqs=size, max_num_batched_tokens=512).core
    crowd, out = Crowd(core), []
    crowd.add(*(Job(f"r{i}", text[i * plan.prompt : (i + 1) * plan.prompt], written) for i in range(size)))
    while not all(answer.tokens for answer in crowd.answers.values()):
        crowd.step()
    while not any(answer.finished for answer in crowd.answers.values()):
        out.append(crowd.step())
    crowd.stop()
    return out


def _row(size: int, times: list[float], alone: list[float]) -> dict[str, Any]:
    speed = size / statistics.median(times)
    return {
        "batch": size,
        "step": 1000 * statistics.median(times),
        "fastest step": 1000 * min(times),
        "tokens of all": speed,
        "tokens of each": speed / size,
        "times one request": speed * statistics.median(alone),
    }


def _finding(plan: Plan, rows: list[dict[str, Any]]) -> Finding:
    one, most = rows[0], rows[-1]
    best = max(rows, key=lambda row: row["tokens of all"])
    gain = most["times one request"]
    sentence = (
        f"One request writes {one['tokens of all']:.0f} tokens a second, {most['batch']} write "
        f"{most['tokens of all']:.0f} together, {gain:.1f} times as many, with {most['tokens of each']:.1f} for each; "
        f"a step takes {most['step']:.1f} ms instead of {one['step']:.1f}. The most, {best['tokens of all']:.0f}, come "
        f"with {best['batch']}."
    )
    plots = [
        Plot(
            "batch-speed",
            "Tokens a second by batch size",
            Axis("batch", "requests", 2),
            Axis("tokens of all requests", "tokens/s"),
            {
                "together": [(float(row["batch"]), row["tokens of all"]) for row in rows],
                "as many times one": [(float(row["batch"]), row["batch"] * one["tokens of all"]) for row in rows],
            },
            reading=f"With {most['batch']} requests the batch reaches {100 * gain / most['batch']:.0f} % of as many "
            "times one request.",
        )
    ]
    method = (
        f"{plan.written} steps in which all requests of a batch write, behind prompts of {plan.prompt} tokens, "
        f"{plan.rounds} times in turns; tokens by the median step."
    )
    units = {
        "batch": "requests",
        "step": "ms",
        "fastest step": "ms",
        "tokens of all": "tokens/s",
        "tokens of each": "tokens/s",
        "times one request": "times",
    }
    return Finding("batch-speed", holds(gain >= _GAIN), sentence, rows, units, plots, method)


EXPERIMENT = Experiment(
    "batch-speed",
    "What a batch brings",
    "Requests that write together get many more tokens a second than one after the other, at the price of a slower "
    "pace for each.",
    _EXPLANATION,
    run,
)
