"""A prompt in chunks of many sizes: speed, memory, and whether the answer stays the same."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sash.lab.apart import apart, bytes_at_rest, peak_bytes
from sash.lab.context import Context
from sash.lab.crowd import Answer, Job, difference, together
from sash.lab.experiment import Axis, Experiment, Finding, Plot, holds

_EXPLANATION = """
A prompt need not be read in one piece. In **chunks**, a step computes some hundred tokens, and what a chunk leaves
behind is the cache alone. Small chunks need little room while a step runs, but each has to fetch all of the model's
weights again; large chunks do more work for one fetch, but everything that is computed on the way, for every token of
the chunk, must lie in memory at once.

With windows there is one thing more. The first token of a chunk looks back over W - 1 tokens that came before it, so
their rows must still be there, and the rows of the chunk itself come on top. The rule of thumb is a page and twice
the larger of window and chunk. An engine that attends to a chunk's rows before it stores them needs the ring alone.

The same prompt is read in chunks of every size, by turns, and a short answer is written. Sizes that are no multiples
of 64 are among them: there kernels cut their work at other places and add numbers in another order, which may change
probabilities a little. Memory is that of a process of its own for each size.
"""
_MIB = 2**20
_OWN = 512
_NEAR = 0.5  # most that the answer's log-probabilities may differ by other orders of sums, in nats
_SLOWER = 0.75  # part of the best speed that the engine's own chunk must reach at least


@dataclass(frozen=True, slots=True)
class Plan:
    """A prompt of ``length`` tokens, read ``rounds`` times in chunks of each size, with ``answer`` tokens written;
    memory is measured at the chunks ``weighed``."""

    length: int
    chunks: tuple[int, ...]
    rounds: int
    answer: int = 16
    weighed: tuple[int, ...] = ()


@dataclass(slots=True)
class Reading:
    """Seconds to the first token of each round, the last round's answer, and pages at the peak by pool."""

    first_s: list[float] = field(default_factory=list)
    answer: Answer = field(default_factory=Answer)
    pools: list[dict[str, Any]] = field(default_factory=list)


def run(context: Context) -> Finding:
    even = (64, 128, 256, 512, 1024, 2048, 4096)
    full = Plan(8192, tuple(sorted((*even, 100, 1000))), 2, weighed=even)
    return measure(context, context.pick(full, Plan(2048, (64, 100, 512, 2048), 3, weighed=(64, 2048))))


def measure(context: Context, plan: Plan, weigh: Callable[..., Any] = apart) -> Finding:
    length = context.lengths_of((min(plan.length, context.spec.max_position - plan.answer),), plan.answer)[-1]
    chunks = [c for c in plan.chunks if c <= length] or [length]
    found = {c: Reading() for c in chunks}
    turns = [c for i in range(plan.rounds) for c in (chunks if i % 2 == 0 else chunks[::-1])]
    text = context.ids(length)
    for chunk in context.track("chunk, speed", turns):
        _read(context, Job("r", text, plan.answer, logprobs=20), chunk, found[chunk])
    weighed = [c for c in chunks if c in plan.weighed]
    peaks = {c: weigh(weigh_chunk, context, length=length, chunk=c) for c in context.track("chunk, memory", weighed)}
    return _finding(context, plan, length, found, peaks)


def _options(length: int, chunk: int) -> dict[str, Any]:
    return {"max_model_len": length, "max_num_seqs": 1, "max_num_batched_tokens": chunk}


def _read(context: Context, job: Job, chunk: int, reading: Reading) -> None:
    llm = context.llm(**_options(job.rows + 1, chunk))
    together(llm.core, [Job("warm", job.prompt[:64], 1)])
    started = time.perf_counter()
    reading.answer = together(llm.core, [job])[job.name]
    reading.first_s.append(reading.answer.moments[0] - started)
    reading.pools = llm.stats()["pools"]


def weigh_chunk(context: Context, *, length: int, chunk: int) -> dict[str, int]:
    """Bytes of this process at rest, at the peak of reading ``length`` tokens, and of the pages that it then holds."""
    text = context.ids(length)
    warm = context.llm(**_options(64, 64))
    together(warm.core, [Job("r", text[:32], 4)])
    del warm
    bytes_at_rest()
    llm = context.llm(**_options(length + 1, chunk))
    rest = bytes_at_rest()
    peak_bytes(reset=True)
    together(llm.core, [Job("r", text, 1)])
    held = sum(pool["peak_pages"] * pool["page_bytes"] for pool in llm.stats()["pools"])
    return {"rest": rest, "peak": peak_bytes(), "held": held}


def _rows(context: Context, length: int, found: dict[int, Reading], peaks: dict[int, Any]) -> list[dict[str, Any]]:
    first = next(iter(found.values())).answer
    rows = []
    for chunk, reading in found.items():
        windows = [pool for pool in reading.pools if pool["window"]]
        size = reading.pools[0]["page_size"]
        peak = peaks.get(chunk)
        rows.append(
            {
                "chunk": chunk,
                "speed": length / statistics.median(reading.first_s),
                "fastest": length / min(reading.first_s),
                "window rows": max((pool["peak_pages"] * size for pool in windows), default=None),
                "rule of thumb": size + 2 * max(context.window, chunk) if windows else None,
                "peak memory": (peak["peak"] - peak["rest"]) / _MIB if peak else None,
                "of it KV": peak["held"] / _MIB if peak else None,
                "tokens the same": reading.answer.tokens == first.tokens,
                "bits the same": reading.answer.scores == first.scores,
                "largest difference": difference(first, reading.answer),
            }
        )
    return rows


def _finding(context: Context, plan: Plan, length: int, found: dict[int, Reading], peaks: dict[int, Any]) -> Finding:
    rows = _rows(context, length, found, peaks)
    by = {row["chunk"]: row for row in rows}
    best = max(rows, key=lambda row: row["fastest"])
    own = by.get(_OWN, best)
    weighed = [row for row in rows if row["peak memory"] is not None]
    same, others = all(row["tokens the same"] for row in rows), [row for row in rows if not row["bits the same"]]
    largest = max(row["largest difference"] for row in rows)
    flat = len({row["window rows"] for row in rows}) == 1
    share = own["fastest"] / best["fastest"]
    sentence = (
        f"{length} tokens are read at {rows[0]['fastest']:.0f} tokens a second in chunks of {rows[0]['chunk']}, at "
        f"{own['fastest']:.0f} in chunks of {own['chunk']} and at {rows[-1]['fastest']:.0f} in chunks of "
        f"{rows[-1]['chunk']}; "
        + (_weighed_words(weighed) if weighed else "")
        + f"the answer is {'the same' if same else 'NOT the same'} at every size, its probabilities "
        + (f"bit for bit except at {_listed(others)} ({largest:.2g} nats at most)" if others else "bit for bit")
        + (_window_words(rows, flat) if context.window else ".")
    )
    plots = [_speed_plot(rows, own, share)]
    if context.window:
        plots.append(_window_plot(context.window, rows))
    if weighed:
        plots.append(_memory_plot(weighed))
    method = (
        f"A prompt of {length} tokens and an answer of {plan.answer}, {plan.rounds} times in turns for each size; "
        "speed is the prompt's tokens by the time to the first token, median and fastest. The 20 best tokens' "
        "log-probabilities of every token of the answer are compared with those of the smallest chunk. Memory: in a "
        "process of its own for each size, the most that was resident while the prompt was read, less what was "
        "resident before."
    )
    units = {
        "chunk": "tokens",
        **dict.fromkeys(("speed", "fastest"), "tokens/s"),
        **dict.fromkeys(("window rows", "rule of thumb"), "tokens"),
        **dict.fromkeys(("peak memory", "of it KV"), "MiB"),
        "largest difference": "nats",
    }
    verdict = holds(
        same,
        largest <= _NEAR,
        flat,
        share >= _SLOWER,
        not weighed or weighed[-1]["peak memory"] >= weighed[0]["peak memory"],
    )
    return Finding("chunk", verdict, sentence, rows, units, plots, method)


def _listed(rows: list[dict[str, Any]]) -> str:
    return ", ".join(str(row["chunk"]) for row in rows)


def _weighed_words(weighed: list[dict[str, Any]]) -> str:
    a, b = weighed[0], weighed[-1]
    return (
        f"memory beyond what is held at rest peaks at {a['peak memory']:.0f} MiB with chunks of {a['chunk']} and at "
        f"{b['peak memory']:.0f} with {b['chunk']}, of which {b['of it KV']:.0f} are the cache; "
    )


def _window_words(rows: list[dict[str, Any]], flat: bool) -> str:
    last = rows[-1]
    if flat:
        return f", and the windows hold {last['window rows']} rows, whatever the chunk."
    return f", but the windows hold {rows[0]['window rows']} to {last['window rows']} rows."


def _speed_plot(rows: list[dict[str, Any]], own: dict[str, Any], share: float) -> Plot:
    return Plot(
        "chunk-speed",
        "Reading a prompt by chunk size",
        Axis("chunk", "tokens", 2),
        Axis("speed", "tokens/s"),
        {
            "fastest": [(float(row["chunk"]), row["fastest"]) for row in rows],
            "median": [(float(row["chunk"]), row["speed"]) for row in rows],
        },
        reading=f"Chunks of {own['chunk']} reach {100 * share:.0f} % of the best speed.",
    )


def _window_plot(window: int, rows: list[dict[str, Any]]) -> Plot:
    last = rows[-1]
    return Plot(
        "chunk-window",
        "Rows that a window layer holds, by chunk size",
        Axis("chunk", "tokens", 2),
        Axis("rows of a window layer", "tokens"),
        {
            "rule of thumb": [(float(row["chunk"]), float(row["rule of thumb"])) for row in rows],
            "held": [(float(row["chunk"]), float(row["window rows"])) for row in rows],
        },
        marks=((float(window), f"W = {window}"),),
        reading=f"With chunks of {last['chunk']} a window layer holds {last['window rows']} rows; a page and twice the "
        f"larger of window and chunk would be {last['rule of thumb']}.",
    )


def _memory_plot(weighed: list[dict[str, Any]]) -> Plot:
    a, b = weighed[0], weighed[-1]
    return Plot(
        "chunk-memory",
        "Peak memory while a prompt is read",
        Axis("chunk", "tokens", 2),
        Axis("beyond what is held at rest", "MiB"),
        {
            "peak": [(float(row["chunk"]), row["peak memory"]) for row in weighed],
            "of it the KV cache": [(float(row["chunk"]), row["of it KV"]) for row in weighed],
        },
        reading=f"Of the peak, {a['peak memory'] - a['of it KV']:.0f} MiB with chunks of {a['chunk']} and "
        f"{b['peak memory'] - b['of it KV']:.0f} with {b['chunk']} are what a step computes on the way.",
    )


EXPERIMENT = Experiment(
    "chunk",
    "A prompt in chunks",
    "The chunk size changes speed and the memory of a step, but neither the answer nor what the windows hold; the "
    "engine's own size is fast enough.",
    _EXPLANATION,
    run,
)
