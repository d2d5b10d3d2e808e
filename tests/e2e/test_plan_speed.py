"""Times that the planner predicts for this machine against the engine's: prompts, decoding after them, and a batch.

The machine's ceilings change from minute to minute where it is shared, so they are measured before and after each
model, the fastest of some runs counts, and a round that something disturbed may be repeated.
"""

from __future__ import annotations

import os
import time

import pytest
from tests.real_models import real_model

from sash.bench.ceiling import Ceiling, measure_apart
from sash.bench.contest import Sash
from sash.bench.text import topics_ids
from sash.planner.capacity import Layout, Precision
from sash.planner.presets import find_preset
from sash.planner.speed import Device, Habits, decode_step, prefill

pytestmark = [pytest.mark.real, pytest.mark.e2e, pytest.mark.timeout(1200)]

WITHIN = 0.30
ANSWER = 64
ROUNDS = 3
LENGTHS = {"gemma3-270m": (512, 4096, 16_384), "smollm2-135m": (512, 4096)}
BATCH = 8


@pytest.mark.parametrize("name", LENGTHS)
def test_predictions_are_within_30_percent(name: str) -> None:
    real_model(name)
    sash = Sash(name, max(LENGTHS[name]) + 2 * ANSWER, {})
    worst = []
    for _ in range(ROUNDS):
        found = compare(name, sash)
        print(*(f"{what}: predicted {p * 1e3:.2f} ms, measured {m * 1e3:.2f} ms" for what, p, m in found), sep="\n")
        worst.append(max(abs(p / m - 1) for _, p, m in found))
        if worst[-1] <= WITHIN:
            return
    pytest.fail(f"furthest off, round by round: {worst}")


def compare(name: str, sash: Sash) -> list[tuple[str, float, float]]:
    """What, seconds predicted, seconds measured."""
    shapes = find_preset(name)
    assert shapes is not None and sash.llm.config.quantization == "int8"
    layout = Layout(shapes, Precision(weights="int8", kv=sash.llm.config.demand.dtypes[0]))
    threads = int(os.environ.get("OMP_NUM_THREADS") or min(2, os.cpu_count() or 1))
    before = measure_apart(threads)
    text = topics_ids(sash.llm.tokenizer, max(LENGTHS[name]))
    sash.answer([text[:64]], 4)
    measured = {n: fastest(sash, [text[:n]]) for n in LENGTHS[name]}
    batch = fastest(sash, [[text[0], *text[16 * i : 16 * i + 15]] for i in range(BATCH)])[1]
    device = device_of(before, measure_apart(threads))
    out = []
    for n, (prompt_s, step_s) in measured.items():
        out.append((f"prefill {n}", prefill(layout, device, n).total_s, prompt_s))
        out.append((f"decode after {n}", decode_step(layout, device, n + ANSWER // 2, n).total_s, step_s))
    short = decode_step(layout, device, 16 + ANSWER // 2, 16, BATCH).total_s
    return [*out, (f"decode of {BATCH}", short, batch)]


def fastest(sash: Sash, prompts: list[list[int]], runs: int = 3) -> tuple[float, float]:
    """Seconds until every request had its first token, and of a step after that."""
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        first, _ = sash.answer(prompts, ANSWER)
        times.append((first - started, (time.perf_counter() - first) / (ANSWER - 1)))
    return min(t[0] for t in times), min(t[1] for t in times)


def device_of(*tops: Ceiling) -> Device:
    """The machine between two measurements."""
    read = sum(top.read_bytes_per_s for top in tops) / len(tops)
    rates = {kind: sum(top.gemm_op_per_s[kind] for top in tops) / len(tops) for kind in tops[0].gemm_op_per_s}
    return Device("this machine", read, rates, habits=Habits())
