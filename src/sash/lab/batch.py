"""Requests alone and in batches: whether any sees another's tokens, and whether any is padded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sash.engine.build import build_beside
from sash.engine.core import EngineCore
from sash.engine.llm import engine_config
from sash.lab.context import Context
from sash.lab.crowd import Answer, Job, difference, together
from sash.lab.experiment import Axis, Experiment, Finding, Plot, holds
from sash.lab.toy import toy_spec, toy_weights
from sash.spec.span import Span

_EXPLANATION = """
Requests that run at the same time share every step: the weights are read once for all of them, which is what makes a
batch worth while. They must share nothing else. Each has its own place in its ring and its own length.

Three questions. Does a request get the same answer, with the same probabilities, **alone and in company**? Does
anything change when the **others' texts** are exchanged for different ones of the same lengths? Are exactly the rows
computed that the requests need, or are short ones **padded** to the length of others?

The first is asked twice. Sums of numbers with few digits depend a little on their order, fast kernels choose it by
the shape of the work, and rounding to 8 bits makes a small difference larger. So a model's probabilities may differ
somewhat from one shape of batch to another, although nobody sees anybody else. Therefore a small stack of layers with
random weights is run, too, by kernels that always add in the same order. There, not one bit may differ.
"""
_NEAR = 0.5  # most that written tokens' log-probabilities may differ by other orders of sums, in nats
_TOP = 20
_FIXED, _FAST = "small stack, fixed order", "the model, fast kernels"


@dataclass(frozen=True, slots=True)
class Plan:
    """Requests of ``lengths`` tokens write ``answer`` tokens each, in batches of ``sizes``."""

    lengths: tuple[int, ...]
    answer: int
    sizes: tuple[int, ...]


TOY = Plan((1, 3, 8, 9, 15, 16, 31, 40), 12, (2, 4, 8))


@dataclass(slots=True)
class Tally:
    """Requests of one batch size: how many were compared, wrote the same tokens, had the same bits; the largest
    difference of log-probabilities; how many had the same bits with the others' texts exchanged; and rows."""

    compared: int = 0
    tokens: int = 0
    bits: int = 0
    difference: float = 0.0
    exchanged: int = 0
    computed_rows: int = 0
    needed_rows: int = 0


@dataclass(frozen=True, slots=True)
class Jobs:
    """The requests ``own``, and ``other`` ones of the same lengths with other texts."""

    own: list[Job]
    other: list[Job] = field(default_factory=list)


def run(context: Context) -> Finding:
    full = Plan((5, 17, 64, 200, 511, 700, 1030, 2000), 24, (2, 4, 8))
    return measure(context, context.pick(full, Plan((5, 64, 511, 700), 8, (2, 4))))


def measure(context: Context, plan: Plan, toy: Plan = TOY) -> Finding:
    lengths = context.lengths_of(plan.lengths, plan.answer)
    source = random.Random(context.seed)
    spec = toy_spec((Span.sliding(8), Span.sliding(8), Span.full(), Span.sliding(8)))
    noise = [source.randrange(spec.vocab_size) for _ in range(2 * sum(toy.lengths))]
    built = toy_weights(spec, context.seed, deterministic=True).built
    rows = []
    for stack, it, sizes, jobs, options in (
        (_FIXED, built, toy.sizes, _jobs(noise, toy.lengths, toy.answer, source), {"deterministic": True}),
        (
            _FAST,
            context.weights.built,
            plan.sizes,
            _jobs(context.ids(2 * sum(lengths)), lengths, plan.answer, source),
            context.options,
        ),
    ):
        longest = max(job.rows for job in jobs.own) + 1
        wanted = engine_config({**options, "max_model_len": longest, "max_num_seqs": max(sizes)})
        core = build_beside(it, wanted).core
        # Threads would spend their time waiting for each other on products so small.
        torch.set_num_threads(1 if it is built else context.threads)
        try:
            alone = {job.name: together(core, [job])[job.name] for job in jobs.own}
            for size in context.track(f"batch, {stack}", sizes):
                rows.append(_row(stack, size, _compare(core, jobs, alone, size)))
        finally:
            torch.set_num_threads(context.threads)
    return _finding(plan, lengths, rows)


def _jobs(text: list[int], lengths: Sequence[int], answer: int, source: random.Random) -> Jobs:
    """Requests over pieces of the text, long and short mixed."""
    order, out, place = [*lengths], Jobs([]), 0
    source.shuffle(order)
    for jobs in (out.own, out.other):
        for i, length in enumerate(order):
            jobs.append(Job(f"r{i}", text[place : place + length], answer, logprobs=_TOP))
            place += length
    return out


def _compare(core: EngineCore, jobs: Jobs, alone: dict[str, Answer], size: int) -> Tally:
    """All requests in batches of ``size``; and once more with every second text exchanged, then with the others'."""
    out, before = Tally(), core.counters.computed_tokens
    for first in range(0, len(jobs.own), size):
        own, other = (every[first : first + size] for every in (jobs.own, jobs.other))
        answers = together(core, own)
        out.needed_rows += sum(job.rows for job in own)
        for job in own:
            a, b = alone[job.name], answers[job.name]
            out.compared += 1
            out.tokens += a.tokens == b.tokens
            out.bits += a.scores == b.scores
            out.difference = max(out.difference, difference(a, b))
        for kept in (0, 1):
            mixed = [a if i % 2 == kept else b for i, (a, b) in enumerate(zip(own, other, strict=True))]
            again = together(core, mixed)
            out.needed_rows += sum(job.rows for job in mixed)
            out.exchanged += sum(again[job.name].scores == answers[job.name].scores for job in own[kept::2])
    out.computed_rows = core.counters.computed_tokens - before
    return out


def _row(stack: str, size: int, tally: Tally) -> dict[str, Any]:
    share = 100 / tally.compared
    return {
        "stack": stack,
        "batch": size,
        "tokens as alone": share * tally.tokens,
        "bits as alone": share * tally.bits,
        "largest difference": tally.difference,
        "bits with other neighbours": share * tally.exchanged,
        "rows computed": tally.computed_rows,
        "rows needed": tally.needed_rows,
    }


def _finding(plan: Plan, lengths: list[int], rows: list[dict[str, Any]]) -> Finding:
    fixed, fast = ([row for row in rows if row["stack"] == stack] for stack in (_FIXED, _FAST))
    apart = all(row["bits with other neighbours"] == 100 for row in rows)
    padded = sum(row["rows computed"] - row["rows needed"] for row in rows)
    exact = all(row["tokens as alone"] == row["bits as alone"] == 100 for row in fixed)
    largest = max(row["largest difference"] for row in fast)
    same = min(row["tokens as alone"] for row in fast)
    bits = min(row["bits as alone"] for row in fast)
    sizes = ", ".join(str(row["batch"]) for row in fast)
    sentence = (
        f"Summed in a fixed order, {'every' if exact else 'NOT every'} request has the same tokens and bits alone and "
        f"in batches; with fast kernels, in batches of {sizes}, {same:.0f} % have the same tokens and {bits:.0f} % the "
        f"same bits, and their log-probabilities differ by at most {largest:.2g} nats. When the neighbours' texts are "
        f"exchanged, {'not one bit changes' if apart else 'bits CHANGE'}, and "
        f"{'no row was computed for padding' if not padded else f'{padded} rows were computed that nobody needs'}."
    )
    places = tuple((float(row["batch"]), f"{row['batch']} requests") for row in fast)
    plot = Plot(
        "batch-bits",
        "Requests whose probabilities keep every bit",
        Axis("batch", "requests"),
        Axis("requests", "%"),
        {
            "fixed order: as alone": [(float(row["batch"]), row["bits as alone"]) for row in fixed],
            "fast kernels: as alone": [(float(row["batch"]), row["bits as alone"]) for row in fast],
            "fast kernels: with other neighbours": [
                (float(row["batch"]), row["bits with other neighbours"]) for row in fast
            ],
        },
        "bars",
        ticks=places,
        reading=f"Other neighbours change {'nothing' if apart else 'SOMETHING'}; under fast kernels another shape "
        f"of batch does, by {largest:.2g} nats at most.",
    )
    method = (
        f"Requests of {', '.join(map(str, lengths))} tokens, shuffled, write {plan.answer} tokens each, greedily, with "
        f"the log-probabilities of the {_TOP} best: each alone, then all in batches of each size, then the same "
        "batches with every second text exchanged for another of the same length. The small stack has three layers "
        "with a window of 8 and one full one, and requests of 1 to 40 tokens. Rows computed are the engine's own "
        "count; rows needed are prompts and answers without their last tokens."
    )
    units = {
        "batch": "requests",
        **dict.fromkeys(("tokens as alone", "bits as alone", "bits with other neighbours"), "%"),
        "largest difference": "nats",
        **dict.fromkeys(("rows computed", "rows needed"), "rows"),
    }
    return Finding("batch", holds(exact, apart, padded == 0, largest <= _NEAR), sentence, rows, units, [plot], method)


EXPERIMENT = Experiment(
    "batch",
    "Alone and in company",
    "A request in a batch sees nothing of the others, whatever their lengths, and nothing is computed for padding.",
    _EXPLANATION,
    run,
)
