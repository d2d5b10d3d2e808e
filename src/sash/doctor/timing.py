"""Where a decoding step's time goes: linear layers, attention, head and sampling, Python; and what runs it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sash.doctor.exam import Exam, random_text
from sash.doctor.finding import Finding, Status, ok
from sash.engine.core import EngineCore
from sash.engine.messages import AddRequest
from sash.engine.runner import Runner
from sash.ops import native
from sash.spec.sampling import SamplingParams

TIME, KERNELS = "time", "kernels"
_STEPS = 24
_SHORT = 3


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of one decoding step, the least of some: all of it, the runner's, and the layers'."""

    step_s: float
    run_s: float
    layers_s: float


@contextmanager
def _timed(owner: object, name: str) -> Iterator[list[float]]:
    """Seconds of each call of a method."""
    inner: Callable[..., Any] = getattr(owner, name)
    times: list[float] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            times.append(time.perf_counter() - started)

    setattr(owner, name, call)
    try:
        yield times
    finally:
        delattr(owner, name)


def step_parts(core: EngineCore, prompt: tuple[int, ...], answer: int) -> Parts:
    """Time single greedy rows after a prompt."""
    runner = core.runner
    assert isinstance(runner, Runner)
    core.add(AddRequest(("time",), prompt, SamplingParams(max_tokens=answer, temperature=0.0), (0,)))
    with _timed(core, "step") as steps, _timed(runner, "run") as runs, _timed(runner.executor, "forward") as layers:
        while core.has_work:
            core.step()
    rows = slice(-max(answer - 4, 1), None)  # the prompt's steps and the first ones are warm-up
    return Parts(min(steps[rows]), min(runs[rows]), min(layers[rows]))


def time_finding(exam: Exam) -> Finding:
    """Shares of a step: attention is what a long text costs more than a short one."""
    answer = min(_STEPS, exam.sizes.longest - _SHORT - 1)
    long = exam.sizes.longest - answer - 1
    short = step_parts(exam.core, random_text(exam.spec.vocab_size, _SHORT, 1), answer)
    full = step_parts(exam.core, random_text(exam.spec.vocab_size, long, 2), answer)
    attention = max(full.layers_s - short.layers_s, 0.0)
    linear, head = full.layers_s - attention, max(full.run_s - full.layers_s, 0.0)
    python = max(full.step_s - full.run_s, 0.0)
    shares = [
        ("layers apart from attention", linear),
        (f"attention over {long} tokens", attention),
        ("head, sampling and the step's tensors", head),
        ("scheduling in Python", python),
    ]
    told = ", ".join(f"{name} {seconds / full.step_s:.0%}" for name, seconds in sorted(shares, key=lambda s: -s[1]))
    load = os.getloadavg()[0]
    busy = f"; the machine is busy (load {load:.1f}), so take them with care" if load > _processors() + 0.5 else ""
    return ok(TIME, f"{full.step_s * 1000:.2f} ms for a step of one row, the quickest of {answer}: {told}{busy}")


def kernel_finding(exam: Exam) -> Finding:
    """Whether the quick kernels run, on as many threads as there are processors."""
    runner, config = exam.core.runner, exam.core.config
    assert isinstance(runner, Runner)
    module, note = native.load()
    threads, processors = torch.get_num_threads(), _processors()
    forced = os.environ.get("SASH_KERNELS")
    what = runner.op_by_op or "C++ kernels, whole steps"
    seen = f"{what}; {config.dtype}, weights {config.quantization}, {threads} threads"
    if threads > processors:
        return Finding(
            KERNELS,
            Status.WARN,
            f"{threads} threads on {processors} processors",
            "threads wait for each other's time slices",
            f"--threads {processors}",
        )
    if config.device != "cpu" or config.options.deterministic or not runner.op_by_op:
        return ok(KERNELS, seen)
    if module is None:
        return Finding(
            KERNELS,
            Status.WARN,
            seen,
            f"the C++ kernels don't run: {note}",
            "install a C++ compiler, then pip install --force-reinstall --no-deps sash-llm",
        )
    if forced in ("torch", "reference"):
        return Finding(KERNELS, Status.WARN, seen, f"SASH_KERNELS={forced} asks for slow kernels", "unset SASH_KERNELS")
    return ok(KERNELS, f"{seen} (layers run op by op: {runner.op_by_op})")


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
