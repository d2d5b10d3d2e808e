"""How long running requests wait for their next token while a long prompt is read, by chunk size."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from sash.lab.context import Context
from sash.lab.crowd import Crowd, Job
from sash.lab.experiment import Axis, Experiment, Finding, Plot, holds, thin
from sash.spec.footprint import ceil_div

_EXPLANATION = """
One engine serves many. While some requests write their answers, another arrives with a long prompt. If the engine read
it in one piece, everybody else would wait until that is done: their text would freeze on the screen. So a prompt is
read in **chunks**, and every step carries one chunk along with one token of each request that is writing.

Here some requests are writing when a long prompt arrives. Its chunk size is varied, from small ones to the whole
prompt at once, and for every request the time from each token to its next is taken.
"""
# Most that the longest gap at the engine's own chunk may be of that with the whole prompt in one step.
_SHARE = 0.25
_OWN = 512


@dataclass(frozen=True, slots=True)
class Plan:
    """``runners`` requests write behind prompts of ``short`` tokens when one of ``long`` tokens arrives, after
    ``before`` steps; chunks in tokens, the whole prompt apart; each is measured ``rounds`` times."""

    long: int
    chunks: tuple[int, ...]
    rounds: int
    runners: int = 4
    short: int = 64
    before: int = 24


@dataclass(slots=True)
class Reading:
    """One long prompt: seconds from its arrival to its first token, those of each step until then and of the steps
    before it came, how often a request got no token in a step, and the prompt's first token."""

    first_token_s: float = 0.0
    gaps: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    missed: int = 0
    token: int = -1


def run(context: Context) -> Finding:
    full = Plan(16_384, (64, 256, 512, 1024, 2048, 4096), 2)
    return measure(context, context.pick(full, Plan(4096, (64, 512), 1, before=12)))


def measure(context: Context, plan: Plan) -> Finding:
    [*_, long] = context.lengths_of((min(plan.long, context.spec.max_position - 1),), 1)
    chunks = [c for c in plan.chunks if c < long] + [long]
    found: dict[int, list[Reading]] = {c: [] for c in chunks}
    turns = [c for i in range(plan.rounds) for c in (chunks if i % 2 == 0 else chunks[::-1])]
    for chunk in context.track("stall", turns):
        found[chunk].append(_read(context, plan, long, chunk))
    return _finding(context, plan, long, found)


def _read(context: Context, plan: Plan, long: int, chunk: int) -> Reading:
    """The long prompt in chunks of ``chunk`` while the others write."""
    answer = plan.before + ceil_div(long, chunk) + 2
    text = context.ids(max(long, plan.runners * plan.short))
    core = context.llm(
        max_model_len=max(long + 1, plan.short + answer),
        max_num_seqs=plan.runners + 1,
        # Room for a whole chunk beside the others' tokens, so that every chunk has the size asked for.
        max_num_batched_tokens=max(chunk + plan.runners, plan.runners * plan.short),
        chunked_prefill_size=chunk,
    ).core
    crowd, out = Crowd(core), Reading()
    shorts = (text[i * plan.short : (i + 1) * plan.short] for i in range(plan.runners))
    crowd.add(*(Job(f"r{i}", prompt, answer) for i, prompt in enumerate(shorts)))
    writers = list(crowd.answers.values())
    while not all(writer.tokens for writer in writers):
        crowd.step()
    out.idle = [crowd.step() for _ in range(plan.before)]
    crowd.add(Job("long", text[:long], 1))
    arrived = crowd.answers["long"]
    had = [len(writer.tokens) for writer in writers]
    while not arrived.finished:
        out.gaps.append(crowd.step())
        out.missed += sum(len(w.tokens) < n + len(out.gaps) for w, n in zip(writers, had, strict=True))
    out.first_token_s, out.token = sum(out.gaps), arrived.tokens[0]
    crowd.stop()
    return out


def _row(chunk: int, readings: list[Reading]) -> dict[str, Any]:
    """Of each figure the best of the rounds: what the machine's other work adds is no property of the chunk."""
    return {
        "chunk": chunk,
        "steps": len(readings[0].gaps),
        "longest gap": 1000 * min(max(r.gaps) for r in readings),
        "median gap": 1000 * min(statistics.median(r.gaps) for r in readings),
        "gap before": 1000 * min(statistics.median(r.idle) for r in readings),
        "first token": min(r.first_token_s for r in readings),
        "tokens missed": sum(r.missed for r in readings),
    }


def _finding(context: Context, plan: Plan, long: int, found: dict[int, list[Reading]]) -> Finding:
    rows = [_row(chunk, readings) for chunk, readings in found.items()]
    by = {row["chunk"]: row for row in rows}
    whole, small = rows[-1], rows[0]
    own = by[_OWN] if _OWN in by and long > _OWN else small
    missed = sum(row["tokens missed"] for row in rows)
    same = len({r.token for readings in found.values() for r in readings}) == 1
    short = own["longest gap"] <= _SHARE * whole["longest gap"]
    fastest = min(row["first token"] for row in rows)
    sentence = (
        f"While {long} tokens are read, the longest wait for a token is {whole['longest gap']:.0f} ms if the prompt is "
        f"read at once, {own['longest gap']:.0f} ms in chunks of {own['chunk']} and {small['longest gap']:.0f} ms in "
        f"chunks of {small['chunk']} ({own['gap before']:.1f} ms before it came); the prompt's own first token comes "
        f"after {whole['first token']:.1f}, {own['first token']:.1f} and "
        f"{small['first token']:.1f} s. "
        + (
            "Every request got a token in every step."
            if not missed
            else f"{missed} times a request got NO token in a step."
        )
    )
    gaps = Plot(
        "stall-gap",
        f"Waiting for a token while {long} tokens are read",
        Axis("chunk", "tokens", 2),
        Axis("time from token to token", "ms", 10),
        {
            "longest": [(float(row["chunk"]), row["longest gap"]) for row in rows],
            "median": [(float(row["chunk"]), row["median gap"]) for row in rows],
            "before it came": [(float(row["chunk"]), row["gap before"]) for row in rows],
        },
        reading=f"The longest wait goes from {small['longest gap']:.0f} ms at {small['chunk']} tokens a chunk to "
        f"{whole['longest gap']:.0f} ms with the whole prompt in one step.",
    )
    times = {
        chunk: min(readings, key=lambda r: max(r.gaps)) for chunk, readings in found.items() if by[chunk]["steps"] > 1
    }
    course = Plot(
        "stall-course",
        "The same waits, step by step",
        Axis("time since the long prompt came", "s"),
        Axis("time from token to token", "ms", 10),
        {f"chunks of {chunk}": _course(reading) for chunk, reading in times.items()},
        reading=_course_reading(own["chunk"], times[own["chunk"]]),
    )
    method = (
        f"{plan.runners} requests write behind prompts of {plan.short} tokens; after {plan.before} more steps a prompt "
        f"of {long} tokens arrives. Gaps are the times of the steps until its first token, in each of which every "
        f"request must get a token. Measured {plan.rounds} times in turns; the least of the longest gaps, of the "
        f"medians and of the times to the first token. The shortest of these times was {fastest:.2f} s. The first "
        f"token of the long prompt was {'the same at every size' if same else 'NOT the same'}."
    )
    units = {
        "chunk": "tokens",
        "steps": "steps",
        "first token": "s",
        "tokens missed": "tokens",
        **dict.fromkeys(("longest gap", "median gap", "gap before"), "ms"),
    }
    return Finding("stall", holds(not missed, short), sentence, rows, units, [gaps, course], method)


def _course_reading(chunk: int, reading: Reading) -> str:
    part = max(1, len(reading.gaps) // 4)
    first, last = (1000 * statistics.median(gaps) for gaps in (reading.gaps[:part], reading.gaps[-part:]))
    more = ": every chunk reads what is behind it" if last > first else ""
    return (
        f"With chunks of {chunk} a wait takes {first:.0f} ms in the first quarter of the prompt and {last:.0f} ms in "
        f"the last{more}."
    )


def _course(reading: Reading) -> list[tuple[float, float]]:
    out, now = [], 0.0
    for gap in reading.gaps:
        now += gap
        out.append((now, 1000 * gap))
    return thin(out)


EXPERIMENT = Experiment(
    "stall",
    "A long prompt among others",
    "Read in chunks, a long prompt makes the others wait for one chunk at most, never for the prompt; nobody misses a "
    "step.",
    _EXPLANATION,
    run,
)
