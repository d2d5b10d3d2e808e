"""Given ratios of the two pools against the automatic split, with the same bytes and the same mixed load."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sash.engine.core import EngineCore
from sash.lab.context import Context
from sash.lab.crowd import Crowd, Job
from sash.lab.experiment import Axis, Experiment, Finding, NotApplicable, Plot, Point, holds
from sash.spec.errors import ConfigError
from sash.spec.footprint import ceil_div

_EXPLANATION = """
A hybrid model has two stores: the **full pool** for layers that keep every token, and the **window pool** for those
that keep W. The bytes for both are given; how should they be shared out? Some engines ask for a **ratio**: tokens of
the window pool by tokens of the full pool, and advice goes around to give 0.5 to 0.7 for long contexts and 0.8 to 1.0
for many requests. But what a request needs is its whole length in one pool and W tokens at most in the other, a ratio
of W by its length. Whatever one pool has too much is missing in the other, and requests wait.

A load of few long and many short requests, all there at once, is served with the same bytes at each ratio, and with
the split that the engine computes if no ratio is given. That one knows only how long a request may be at most, not
which will come. The more requests run at once, the fewer steps the load takes. When a request has to wait for memory,
it is noted which pool was short. When a running one needs a page and none is left, the youngest is put back and
computed again later: it is **preempted**.
"""
_ROOM = 1.15  # times the bytes of the longest request under ratio 1, so that every ratio can serve it
_ADVISED = (0.5, 1.0)
_AUTO = "automatic"
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Load:
    """``count`` requests with prompts of ``prompt`` tokens and answers of ``answer``."""

    count: int
    prompt: int
    answer: int

    @property
    def length(self) -> int:
        return self.prompt + self.answer


@dataclass(frozen=True, slots=True)
class Plan:
    """Both loads at each of ``ratios``, ``rounds`` times, with ``seats`` requests at once at most."""

    long: Load
    short: Load
    ratios: tuple[float, ...]
    rounds: int
    seats: int = 16


@dataclass(slots=True)
class Reading:
    """Seconds of each round; of the last one steps, requests that ran in each, what the first waiting one lacked
    after each, preemptions, rows computed again, and the pools."""

    seconds: list[float] = field(default_factory=list)
    steps: int = 0
    running: int = 0
    lacked: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0
    again: int = 0
    pools: list[dict[str, Any]] = field(default_factory=list)


def run(context: Context) -> Finding:
    full = Plan(Load(4, 3072, 64), Load(32, 64, 96), (0.1, 0.2, 0.3, 0.5, 0.7, 1.0), 2)
    return measure(context, context.pick(full, Plan(Load(2, 2000, 16), Load(12, 32, 32), (0.1, 0.3, 1.0), 1)))


def measure(context: Context, plan: Plan) -> Finding:
    if not context.window:
        raise NotApplicable("no layer of this model has a window.")
    if all(layer.span.bounded for layer in context.spec.layers):
        raise NotApplicable("every layer of this model has a window, so there is one kind of pool only.")
    if context.spec.max_position < plan.long.length:
        raise NotApplicable(f"the model's context is shorter than a request of {plan.long.length} tokens.")
    jobs, budget = _jobs(context, plan), _budget(context, plan.long.length)
    found: dict[str, Reading] = {name: Reading() for name in (_AUTO, *map(str, plan.ratios))}
    turns = [n for i in range(plan.rounds) for n in (list(found) if i % 2 == 0 else list(found)[::-1])]
    for name in context.track("ratio", turns):
        core = _core(context, plan, budget, name)
        if core is None:
            found.pop(name, None)
        else:
            _serve(core, jobs, found[name])
    return _finding(plan, budget, jobs, found)


def _jobs(context: Context, plan: Plan) -> list[Job]:
    """Long and short requests in an order that the seed decides."""
    source = random.Random(context.seed)
    loads = [load for load in (plan.long, plan.short) for _ in range(load.count)]
    source.shuffle(loads)
    text = context.ids(sum(load.prompt for load in loads))
    jobs, place = [], 0
    for i, load in enumerate(loads):
        jobs.append(Job(f"r{i}", text[place : place + load.prompt], load.answer))
        place += load.prompt
    return jobs


def _budget(context: Context, longest: int) -> int:
    demand = context.weights.built.config.demand
    return int(_ROOM * ceil_div(longest, demand.page_size) * sum(demand.page_bytes()))


def _core(context: Context, plan: Plan, budget: int, name: str) -> EngineCore | None:
    """An engine with that split; None where its pools could never serve the longest request."""
    given: dict[str, Any] = {} if name == _AUTO else {"swa_full_tokens_ratio": float(name)}
    try:
        return context.llm(
            max_model_len=plan.long.length, max_num_seqs=plan.seats, kv_cache_memory_bytes=budget, **given
        ).core
    except ConfigError:
        return None


def _serve(core: EngineCore, jobs: list[Job], out: Reading) -> None:
    crowd, reading, total = Crowd(core), Reading(), 0.0

    def watch(seconds: float) -> None:
        nonlocal total
        total += seconds
        reading.steps += 1
        reading.running += len(core.scheduler.running)
        reading.lacked.update(lacks(core))

    crowd.add(*jobs)
    crowd.run(watch)
    out.seconds.append(total)
    out.steps, out.running, out.lacked = reading.steps, reading.running, reading.lacked
    out.preemptions = core.scheduler.num_preemptions
    out.again = core.counters.computed_tokens - sum(job.rows for job in jobs)
    out.pools = [
        {"kind": _kind(group.bounded), "pages": pool.total, "peak": pool.peak}
        for group, pool in zip(core.ledger.groups, core.ledger.stats(), strict=True)
    ]


def _kind(bounded: bool) -> str:
    return "window" if bounded else "full"


def lacks(core: EngineCore) -> set[str]:
    """What the first waiting request would need to begin: seats, or pages of these kinds of pools."""
    scheduler, ledger, demand = core.scheduler, core.ledger, core.config.demand
    if not scheduler.waiting:
        return set()
    if scheduler.lack == "seats":
        return {"seats"}
    ticket = scheduler.waiting[0]
    short = set()
    for group, pool in zip(ledger.groups, ledger.pools, strict=True):
        shape = demand.bound_shape(group.span.bind(ticket.prompt_tokens))
        if shape.pages(ticket.max_tokens if group.bounded else ticket.known) > pool.available:
            short.add(_kind(group.bounded))
    return short


def _row(name: str, reading: Reading, jobs: list[Job]) -> dict[str, Any]:
    written = sum(job.new_tokens for job in jobs)
    size = {p["kind"]: p["pages"] for p in reading.pools}
    peak = {p["kind"]: 100 * p["peak"] / p["pages"] for p in reading.pools}
    return {
        "split": name,
        "ratio": size["window"] / size["full"],
        "full pool": size["full"],
        "window pool": size["window"],
        "speed": written / statistics.median(reading.seconds),
        "fastest": written / min(reading.seconds),
        "steps": reading.steps,
        "running": reading.running / reading.steps,
        "waits for full": 100 * reading.lacked["full"] / reading.steps,
        "waits for windows": 100 * reading.lacked["window"] / reading.steps,
        "preemptions": reading.preemptions,
        "computed again": reading.again,
        "full peak": peak["full"],
        "window peak": peak["window"],
    }


def _binds(row: dict[str, Any]) -> str:
    """Which pool requests wait for, in words."""
    full, window = row["waits for full"], row["waits for windows"]
    if not full and not window:
        return "neither pool"
    return "the full pool" if full > window else "the window pool" if window > full else "both pools"


def _finding(plan: Plan, budget: int, jobs: list[Job], found: dict[str, Reading]) -> Finding:
    rows = [_row(name, reading, jobs) for name, reading in found.items()]
    auto, given = rows[0], rows[1:]
    if not given:
        raise NotApplicable("no ratio leaves room for a request of the longest length.")
    best = min(given, key=lambda row: row["steps"])
    low, high = _ADVISED
    advised = [row for row in given if low <= float(row["split"]) <= high and row is not best]
    middle = statistics.median(row["steps"] for row in given)
    preempted = [row["preemptions"] for row in given]
    sentence = (
        f"With {budget / _MIB:.0f} MiB the automatic split, a ratio of {auto['ratio']:.2f}, serves the load in "
        f"{auto['steps']} steps ({auto['fastest']:.0f} tokens a second), the best ratio tried, {best['split']}, in "
        f"{best['steps']} ({best['fastest']:.0f})"
        + "".join(f", the advised {row['split']} in {row['steps']} ({row['fastest']:.0f})" for row in advised)
        + f". Under the automatic split requests waited for {_binds(auto)}, at {given[0]['split']} for "
        f"{_binds(given[0])} and at {given[-1]['split']} for {_binds(given[-1])}; it preempted {auto['preemptions']} "
        f"times, the ratios {min(preempted)} to {max(preempted)} times."
    )
    method = (
        f"{plan.long.count} requests of {plan.long.prompt} + {plan.long.answer} tokens and {plan.short.count} of "
        f"{plan.short.prompt} + {plan.short.answer}, shuffled, all there from the start, {plan.seats} at once at most, "
        f"{plan.rounds} times in turns over the splits; tokens of the answers by the whole time. After every step it "
        "is noted what the first waiting request lacked."
    )
    units = {
        **dict.fromkeys(("full pool", "window pool"), "pages"),
        "ratio": "window tokens / full tokens",
        **dict.fromkeys(("speed", "fastest"), "tokens/s"),
        "steps": "steps",
        "running": "requests",
        **dict.fromkeys(("waits for full", "waits for windows"), "% of steps"),
        "preemptions": "times",
        "computed again": "rows",
        **dict.fromkeys(("full peak", "window peak"), "%"),
    }
    return Finding(
        "ratio",
        holds(auto["steps"] <= middle, auto["preemptions"] <= min(preempted)),
        sentence,
        rows,
        units,
        _plots(auto, given, best),
        method,
    )


def _plots(auto: dict[str, Any], given: list[dict[str, Any]], best: dict[str, Any]) -> list[Plot]:
    def line(column: str) -> list[Point]:
        return [(float(row["split"]), row[column]) for row in given]

    marks = ((auto["ratio"], "automatic"),)
    ratio = Axis("ratio", "window tokens / full tokens", 2)
    first, last = given[0], given[-1]
    return [
        Plot(
            "ratio-speed",
            "A mixed load at the same bytes",
            ratio,
            Axis("tokens of all answers", "tokens/s"),
            {
                "given ratio": line("fastest"),
                "automatic split": [(x, auto["fastest"]) for x, _ in line("fastest")],
            },
            marks=marks,
            reading=f"The automatic split reaches {100 * auto['fastest'] / best['fastest']:.0f} % of the speed that "
            f"{best['split']} has; {last['split']} reaches {100 * last['fastest'] / best['fastest']:.0f} % of it.",
        ),
        Plot(
            "ratio-running",
            "Requests that run at once",
            ratio,
            Axis("mean over all steps", "requests"),
            {
                "given ratio": line("running"),
                "automatic split": [(x, auto["running"]) for x, _ in line("running")],
            },
            marks=marks,
            reading=f"On average {best['running']:.1f} requests run at once at {best['split']}, {auto['running']:.1f} "
            f"under the automatic split and {last['running']:.1f} at {last['split']}.",
        ),
        Plot(
            "ratio-waits",
            "What waiting requests wait for",
            ratio,
            Axis("steps in which it is short", "% of steps"),
            {"full pool": line("waits for full"), "window pool": line("waits for windows")},
            marks=marks,
            reading=f"At {first['split']} the full pool is short in {first['waits for full']:.0f} % of the steps and "
            f"the window pool in {first['waits for windows']:.0f}; at {last['split']} it is "
            f"{last['waits for full']:.0f} and {last['waits for windows']:.0f}.",
        ),
    ]


EXPERIMENT = Experiment(
    "ratio",
    "Two pools, and how to share the bytes",
    "Which ratio is best depends on the requests' lengths; the split that the engine computes without knowing them "
    "does at least as well as the middle one of the ratios tried, and preempts nobody more often.",
    _EXPLANATION,
    run,
)
