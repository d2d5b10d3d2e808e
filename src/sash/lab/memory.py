"""Bytes of a request's cache: as the formula says, as the pools take, and as they lie in the process."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from sash.engine.runner import Runner
from sash.kv.storage import KVPool
from sash.lab.apart import apart, bytes_at_rest
from sash.lab.context import Context, all_full, all_windows
from sash.lab.crowd import Job, together
from sash.lab.experiment import Axis, Experiment, Finding, NotApplicable, Plot, Verdict, holds
from sash.spec.footprint import row_bytes, uniform_bytes
from sash.spec.groups import group_layers
from sash.spec.model import ModelSpec

_EXPLANATION = """
All that was said about memory so far were counts of pages. Are they true? One formula says what a request of some
length takes: layers, heads, head size, bytes of a number, and in window layers W instead of the length. From it the
pools get their size, requests are admitted, and this report has its figures. So a pool is made that has room for one
request of that length and no more, the request is read, and three others are asked: the pools, how many bytes they
allocated; the engine, how many pages hold rows; and the **operating system**, how many bytes of these pools lie in
memory.

The same model is taken in three stacks: with full attention in every layer, with its own layers, and with its window
in every layer. Beside them stands what a cache that knows no windows would take. Each stack is measured in a process
of its own.
"""
_MIB = 2**20
_COLUMNS = ("predicted", "allocated", "held", "resident before", "resident", "growth", "uniform")
# Part of a pool that may lie in memory before the request; else what lies there after it proves nothing.
_UNTOUCHED = 0.1
_LEAST = 256  # tokens
_NEAR = 0.02  # part by which resident bytes may differ: the system counts pages of its own


@dataclass(frozen=True, slots=True)
class Plan:
    """Requests of so many tokens, prompt and one token of answer."""

    lengths: tuple[int, ...]


def run(context: Context) -> Finding:
    if min(context.lengths, default=_LEAST) < _LEAST:
        raise NotApplicable(f"rows of fewer than {_LEAST} tokens take too few of the system's pages to tell anything.")
    return measure(context, context.pick(Plan((1024, 4096, 8192, 16_384)), Plan((1024, 3072))))


def measure(context: Context, plan: Plan, weigh: Callable[..., Any] = apart) -> Finding:
    size = context.weights.built.config.demand.page_size
    lengths = sorted({max(n // size, 1) * size for n in context.lengths_of(plan.lengths)})
    found = {
        stack: weigh(weigh_stack, context, stack=stack, lengths=lengths)
        for stack in context.track("memory", stacks(context))
    }
    return _finding(context, lengths, found)


def stacks(context: Context) -> dict[str, ModelSpec]:
    """The model with full attention, as it is, and with windows only, as far as these differ."""
    spec, window = context.spec, context.window
    out = {"full": all_full(spec)}
    if any(layer.span.bounded for layer in spec.layers) and not all(layer.span.bounded for layer in spec.layers):
        out["hybrid"] = spec
    if window:
        out["pure"] = all_windows(spec, window)
    return out


def weigh_stack(context: Context, *, stack: str, lengths: list[int]) -> list[dict[str, int]]:
    """For each length, bytes of a request's cache by all who know of them, and by how much the process has grown."""
    spec, text = stacks(context)[stack], context.ids(lengths[-1])
    warm = context.llm(max_model_len=64, max_num_seqs=1)
    together(warm.core, [Job("r", text[:32], 4)])
    del warm
    out = []
    for length in lengths:
        bytes_at_rest()  # gives back holes that small blocks have left in the heap: planes may come to lie there
        llm = context.llm(spec, max_model_len=length, max_num_seqs=1)
        demand, pools = llm.config.demand, cast(Runner, llm.core.runner).pools
        rest = bytes_at_rest()
        untouched = _resident(pools)
        together(llm.core, [Job("r", text[: length - 1], 1)])
        needed = zip(demand.groups, demand.page_bytes(), strict=True)
        report = llm.core.report()
        out.append(
            {
                "predicted": sum(demand.shape(group).pages(length) * size for group, size in needed),
                "allocated": sum(pool.num_bytes for pool in pools),
                "held": sum(pool.peak_pages * pool.page_bytes for pool in report.pools),
                "resident before": untouched,
                "resident": _resident(pools),
                "growth": bytes_at_rest() - rest,
                "uniform": uniform_bytes(demand.groups, length, demand.page_size, demand.dtypes),
            }
        )
        del llm, pools
    return out


def _resident(pools: tuple[KVPool, ...]) -> int:
    return sum(resident(plane) for pool in pools for plane in pool.planes)


def resident(tensor: torch.Tensor) -> int:
    """Bytes of a tensor that lie in memory now, by the operating system's account (mincore, Linux).

    Raises:
        OSError: the system gives no account.
    """
    size, page = tensor.numel() * tensor.element_size(), mmap.PAGESIZE
    start = tensor.data_ptr()
    base = start // page * page
    flags = (ctypes.c_ubyte * (-(-(start + size - base) // page)))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(base), ctypes.c_size_t(start + size - base), flags):
        raise OSError(ctypes.get_errno(), "mincore gives no account of memory")
    there = [base + i * page for i, flag in enumerate(flags) if flag & 1]
    return sum(min(place + page, start + size) - max(place, start) for place in there)


def _rows(lengths: list[int], found: dict[str, list[dict[str, int]]]) -> list[dict[str, Any]]:
    return [
        {"stack": stack, "length": length, **{column: entry[column] / _MIB for column in _COLUMNS}}
        | ({} if _measured(entry) else {"resident": None})
        for stack, entries in found.items()
        for length, entry in zip(lengths, entries, strict=True)
    ]


def _measured(entry: dict[str, int]) -> bool:
    """Whether the pools lay in memory that nobody had used before."""
    return entry["resident before"] <= _UNTOUCHED * entry["predicted"]


def _finding(context: Context, lengths: list[int], found: dict[str, list[dict[str, int]]]) -> Finding:
    entries = [entry for of_stack in found.values() for entry in of_stack]
    exact = all(entry["predicted"] == entry["allocated"] == entry["held"] for entry in entries)
    seen = [entry for entry in entries if _measured(entry)]
    before = max((entry["resident before"] / entry["predicted"] for entry in seen), default=0.0)
    worst = max((abs(entry["resident"] / entry["predicted"] - 1) for entry in seen), default=0.0)
    demand = context.weights.built.config.demand
    # Full layers of every stack store what those of the model do.
    kinds = zip(demand.groups, demand.dtypes, strict=True)
    dtype = next((dtype for group, dtype in kinds if not group.bounded), demand.dtypes[0])
    slopes, rates = {}, {}
    for stack, of_stack in found.items():
        groups = group_layers(stacks(context)[stack])
        rates[stack] = sum(row_bytes(g, dtype) for g in groups if not g.bounded)
        if len(lengths) > 1 and lengths[-2] > context.window and all(map(_measured, of_stack[-2:])):
            slopes[stack] = (of_stack[-1]["resident"] - of_stack[-2]["resident"]) / (lengths[-1] - lengths[-2])
    right = all(abs(slope - rates[s]) <= _NEAR * max(rates.values()) for s, slope in slopes.items())
    last = lengths[-1]
    own = "hybrid" if "hybrid" in found else "pure" if "pure" in found else "full"
    it = found[own][-1]
    sentence = (
        f"For {last} tokens the formula says {it['predicted'] / _MIB:.2f} MiB ({own} stack); the pools allocated "
        f"{it['allocated'] / _MIB:.2f}, pages with rows take {it['held'] / _MIB:.2f}, and "
        + (f"{it['resident'] / _MIB:.2f} lie in memory." if _measured(it) else "what lies in memory is not measured.")
        + _account(seen, worst, before)
        + _unmeasured(len(entries) - len(seen))
        + _slope_words(slopes)
        + f" A cache without windows takes {it['uniform'] / _MIB:.1f} MiB, {it['uniform'] / it['predicted']:.1f} times "
        "as much."
    )
    method = (
        f"Requests of {', '.join(map(str, lengths))} tokens, each in an engine whose pools have room for it and no "
        "more, in a process for each stack. Resident: the pools' bytes that the system has in memory "
        "(mincore), before the request and after it. "
        "Growth: what the whole process holds more after the request than before it, scratch memory given back."
    )
    units = {"length": "tokens", **dict.fromkeys(_COLUMNS, "MiB")}
    verdict = Verdict.SKIPPED if exact and not seen else holds(exact, worst <= _NEAR, right)
    plots = _plots(context, lengths, found, worst, slopes)
    return Finding("memory", verdict, sentence, _rows(lengths, found), units, plots, method)


def _account(seen: list[dict[str, int]], worst: float, before: float) -> str:
    if not seen:
        return ""
    return (
        f" Over all {len(seen)} requests that were measured the system's account differs from the formula by "
        f"{100 * worst:.2f} % at most; before the request it was {100 * before:.1f} % of that at most."
    )


def _unmeasured(count: int) -> str:
    if not count:
        return ""
    return (
        f" Requests not measured: {count}, whose pools lay in memory of which more than {100 * _UNTOUCHED:.0f} % had "
        "been used before."
    )


def _slope_words(slopes: dict[str, float]) -> str:
    if not slopes:
        return ""
    parts = ", ".join(f"{stack} {slope:.0f}" for stack, slope in slopes.items())
    return f" Past the window a token more takes so many bytes: {parts}."


def _points(lengths: list[int], entries: list[dict[str, int]]) -> list[tuple[float, dict[str, int]]]:
    return [(float(n), entry) for n, entry in zip(lengths, entries, strict=True) if _measured(entry)]


def _plots(
    context: Context,
    lengths: list[int],
    found: dict[str, list[dict[str, int]]],
    worst: float,
    slopes: dict[str, float],
) -> list[Plot]:
    marks = ((float(context.window), f"W = {context.window}"),) if context.window else ()
    points = {stack: _points(lengths, of_stack) for stack, of_stack in found.items()}
    points = {stack: measured for stack, measured in points.items() if measured}
    lines = {f"{stack}, resident": [(n, e["resident"] / _MIB) for n, e in them] for stack, them in points.items()}
    errors = {
        stack: [(n, 100 * (e["resident"] / e["predicted"] - 1)) for n, e in them] for stack, them in points.items()
    }
    uniform = [(float(n), e["uniform"] / _MIB) for n, e in zip(lengths, found["full"], strict=True)]
    plots = [
        Plot(
            "memory-length",
            "KV memory of one request in the process",
            Axis("length", "tokens"),
            Axis("bytes in memory", "MiB"),
            {"cache without windows": uniform, **lines},
            marks=marks,
            reading=f"Three straight lines with different slopes.{_slope_words(slopes)}"
            if len(slopes) == 3
            else f"Without windows the longest request takes {uniform[-1][1]:.1f} MiB.",
        ),
        Plot(
            "memory-error",
            "Formula and memory",
            Axis("length", "tokens", 2),
            Axis("resident beyond the formula", "%"),
            errors,
            reading=f"What lies in memory is what the formula says, within {100 * worst:.2f} %.",
        ),
    ]
    return plots if errors else plots[:1]


EXPERIMENT = Experiment(
    "memory",
    "Are the bytes true?",
    "The formula, the pools, the pages and the operating system give the same bytes, and these grow by the full layers "
    "alone.",
    _EXPLANATION,
    run,
)
