"""``sash bench offline``: sash alone. Prefill and decode over lengths and batches beside the ceilings, and what
needs no peer: perplexity, memory by length, time per token by context, and the time to the first token of a start."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sash.bench import ceiling
from sash.bench.cases import Case, Timing, figures, line
from sash.bench.contest import Sash
from sash.bench.memory import measure_apart
from sash.bench.own import decode_step_s, first_token_s
from sash.bench.record import circumstances
from sash.bench.text import topics_ids
from sash.spec.load import load_spec
from sash.spec.locate import locate


@dataclass(frozen=True, slots=True)
class Own:
    """What to measure besides speed. Lengths in tokens: ``scored`` of texts whose perplexity is taken, ``contexts``
    for the time per token, ``memory`` of requests; ``starts`` of the command."""

    scored: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    memory: tuple[int, ...] = ()
    starts: int = 0

    def within(self, limit: int) -> Own:
        """What fits a model whose longest request has ``limit`` tokens."""
        scored, contexts, memory = (
            tuple(n for n in lengths if n + _ROOM <= limit) for lengths in (self.scored, self.contexts, self.memory)
        )
        return Own(scored, contexts, memory, self.starts)


OWN = {
    "all": Own((2048, 8192), (1000, 30_000), (1000, 16_384, 32_000), 3),
    "short": Own((2048,), (1000,), (1000,), 2),
    "none": Own(),
}
_ROOM = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. ``own`` is a key of ``OWN``."""

    model: str
    cases: tuple[Case, ...]
    repeats: int
    threads: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    own: str = "none"


def run(plan: Plan, say: Any = print) -> dict[str, Any]:
    """Measure everything in ``plan``; returns the record.

    Raises:
        ModelError, ConfigError: the model or an option.
        SashError: a request failed.
    """
    import torch

    torch.set_num_threads(plan.threads)
    own = OWN[plan.own].within(load_spec(locate(plan.model)).max_position)
    longest = max(c.prompt + c.new_tokens for c in plan.cases)
    longest = max(2048, longest, *(n + _ROOM for n in own.scored + own.contexts))
    sash = Sash(plan.model, longest, plan.options)
    text = topics_ids(sash.llm.tokenizer, max(longest, *(case.tokens for case in plan.cases)))
    top, precision = ceiling.measure_apart(plan.threads), sash.precision
    found: list[dict[str, Any]] = []
    for case in plan.cases:
        timings = {"sash": _time(sash, case, text, plan.repeats)}
        found += figures(case, timings, lambda case, kind: case.ceiling(kind, top, sash.llm.spec, precision))
        for figure in found[-len(case.kinds) :]:
            say(line(figure))
    extra = _own(plan, own, sash, text)
    for name, value in extra.items():
        say(f"{name}: {json.dumps(value)}")
    return {
        "command": "sash bench offline",
        # Nothing is drawn at random: greedy answers to a text that Python brings along.
        "seed": None,
        **circumstances(Path(__file__)),
        "model": plan.model,
        "repeats": plan.repeats,
        "threads": plan.threads,
        "options": dict(plan.options),
        "precision": asdict(precision),
        "versions": {"sash": sash.version, "torch": torch.__version__},
        "ceiling": asdict(top),
        "figures": found,
        **extra,
    }


def _time(sash: Sash, case: Case, text: list[int], repeats: int) -> list[Timing]:
    prompts = case.prompts(text)
    sash.answer([prompt[:64] for prompt in prompts], 4)
    timings = []
    for _ in range(repeats):
        started = time.perf_counter()
        first, _ = sash.answer(prompts, case.new_tokens)
        timings.append(Timing(first - started, time.perf_counter() - first))
    return timings


def _own(plan: Plan, own: Own, sash: Sash, text: list[int]) -> dict[str, Any]:
    """Perplexity by tokens, seconds per token by context, memory by length, seconds to a start's first token."""
    out: dict[str, Any] = {
        "perplexity": {n: math.exp(sum(scores) / len(scores)) for n in own.scored if (scores := sash.score(text[:n]))},
        "token_s": decode_step_s(sash, text, own.contexts),
        "memory": [measure_apart(plan.model, n, plan.options) for n in own.memory],
        "first_token_s": first_token_s(plan.model, plan.options, own.starts),
    }
    return {name: value for name, value in out.items() if value}
