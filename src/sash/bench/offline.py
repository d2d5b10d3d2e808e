"""``sash bench offline``: prefill and decode over lengths and batch sizes, beside a peer in alternating runs."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sash.bench import ceiling
from sash.bench.contest import Contestant, Sash, Timing, Transformers
from sash.bench.memory import measure_apart
from sash.bench.record import circumstances
from sash.spec.config import DTYPE_BYTES
from sash.spec.errors import ConfigError

# Two engines in the same precision: perplexity of the same text must agree this closely before timing.
_SAME_PERPLEXITY = 0.005
_GATE_TOKENS = 512
PEERS = ("transformers", "none")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. ``lengths`` of prompts in tokens; ``memory`` lengths for the memory lines, none to skip."""

    model: str
    dtype: str
    against: str
    lengths: tuple[int, ...]
    repeats: int
    memory: tuple[int, ...]
    new_tokens: int = 32
    batch: int = 8
    batch_tokens: int = 128


@dataclass(slots=True)
class Figure:
    """One line of the result: tokens per second, the peer's, and the machine's ceiling."""

    name: str
    sash: float
    peer: float | None = None
    ceiling: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def run(plan: Plan, say: Any = print) -> dict[str, Any]:
    """Measure everything in ``plan``; returns the record.

    Raises:
        ConfigError: an unknown dtype or peer, or outputs that don't agree: nothing was timed then.
    """
    if plan.dtype not in DTYPE_BYTES:
        raise ConfigError(f"--dtype {plan.dtype!r} is unknown; use {', '.join(DTYPE_BYTES)}")
    if plan.against not in PEERS:
        raise ConfigError(f"--against {plan.against!r} is unknown; use {' or '.join(PEERS)}")
    longest = max(*plan.lengths, 2048) + plan.new_tokens
    sash = Sash(plan.model, plan.dtype, longest)
    peer = _peer(plan)
    text = _text(sash, max(*plan.lengths, _GATE_TOKENS))
    agreement = _gate(sash, peer, text)
    say(f"perplexity of 512 tokens: {json.dumps(agreement)}")
    top = ceiling.measure(getattr(torch, plan.dtype))
    figures: list[Figure] = []
    for length in plan.lengths:
        figures += _lengths(plan, sash, peer, text[:length], top)
        for figure in figures[-2:]:
            say(_line(figure))
    figures.append(_batch(plan, sash, text))
    say(_line(figures[-1]))
    memory = [measure_apart(plan.model, plan.dtype, n) for n in plan.memory]
    for entry in memory:
        pools = ", ".join(f"{k} {v / 2**20:.2f} MiB" for k, v in entry["pool_bytes"].items())
        say(f"one request of {entry['tokens']} tokens: {pools}; process {entry['resident_bytes'] / 1e6:.0f} MB")
    return _record(plan, sash, peer, agreement, top, figures, memory)


def _peer(plan: Plan) -> Contestant | None:
    return Transformers(plan.model, plan.dtype) if plan.against == "transformers" else None


def _text(sash: Sash, length: int) -> list[int]:
    """Token ids of a long public text that every Python brings along, repeated as needed."""
    from pydoc_data.topics import topics

    ids: list[int] = []
    for name in sorted(topics):
        ids += sash.llm.tokenizer.encode(topics[name], add_bos=not ids)
        if len(ids) >= length:
            break
    while len(ids) < length:
        ids += ids
    return ids[:length]


def _gate(sash: Sash, peer: Contestant | None, text: list[int]) -> dict[str, float]:
    """Perplexities of one text by name: both engines must find it equally likely.

    Raises:
        ConfigError: they don't, or the peer fails.
        SashError: sash's own request fails.
    """
    out = {"sash": math.exp(sash.negative_log_likelihood(text[:_GATE_TOKENS]))}
    if peer is not None:
        try:
            out[peer.name] = math.exp(peer.negative_log_likelihood(text[:_GATE_TOKENS]))
        except Exception as error:  # a peer may raise anything
            raise ConfigError(f"{peer.name} can't run the model ({error}): use --against none") from error
    if not all(abs(out["sash"] / other - 1) <= _SAME_PERPLEXITY for other in out.values()):  # nor may one be NaN
        raise ConfigError(f"perplexities {out}: nothing is timed unless they are numbers that agree")
    return out


def _lengths(plan: Plan, sash: Sash, peer: Contestant | None, prompt: list[int], top: ceiling.Ceiling) -> list[Figure]:
    """Prefill and decode of one request, sash and the peer in turn; medians."""
    engines: list[Contestant] = [sash] if peer is None else [sash, peer]
    runs: dict[str, list[Timing]] = {e.name: [] for e in engines}
    for engine in engines:
        engine.run(prompt[:256], 4)
    for _ in range(plan.repeats):
        for engine in engines:
            runs[engine.name].append(engine.run(prompt, plan.new_tokens))

    def rates(name: str) -> tuple[float, float]:
        return (
            len(prompt) / statistics.median(t.prefill_s for t in runs[name]),
            (plan.new_tokens - 1) / statistics.median(t.decode_s for t in runs[name]),
        )

    spec, n = sash.llm.spec, len(prompt)
    best = (
        n * top.gemm_flop_per_s / ceiling.prefill_flop(spec, n),
        top.read_bytes_per_s / ceiling.decode_bytes(spec, n, plan.dtype),
    )
    ours, theirs = rates("sash"), (rates(peer.name) if peer else (None, None))
    extra = {"greedy_tokens_equal": _agreement(runs)} if peer else {}
    return [
        Figure(f"prefill {n}", ours[0], theirs[0], best[0]),
        Figure(f"decode after {n}", ours[1], theirs[1], best[1], extra),
    ]


def _agreement(runs: dict[str, list[Timing]]) -> str:
    """How many greedy tokens agree before the first difference: rounding parts close calls."""
    a, b = (timings[0].tokens for timings in runs.values())
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return f"{same} of {len(a)}"


def _batch(plan: Plan, sash: Sash, text: list[int]) -> Figure:
    """``batch`` requests at once against one alone: how much the batch shares."""
    prompts = [text[16 * i : 16 * i + 16] for i in range(plan.batch)]
    sash.run_batch(prompts, 8)
    alone, together = [], []
    for _ in range(plan.repeats):
        alone.append(plan.batch_tokens / sash.run_batch(prompts[:1], plan.batch_tokens))
        together.append(plan.batch * plan.batch_tokens / sash.run_batch(prompts, plan.batch_tokens))
    one, many = statistics.median(alone), statistics.median(together)
    return Figure(f"decode, {plan.batch} requests", many, None, None, {"one_request": one, "ratio_to_one": many / one})


def _line(figure: Figure) -> str:
    parts = [f"{figure.name:22s} {figure.sash:8.1f} tok/s"]
    if figure.peer is not None:
        parts.append(f"peer {figure.peer:8.1f} ratio {figure.sash / figure.peer:5.2f}")
    if figure.ceiling is not None:
        parts.append(f"ceiling {figure.ceiling:8.1f} ({100 * figure.sash / figure.ceiling:.0f} %)")
    parts += [f"{k} {v if isinstance(v, str) else round(v, 2)}" for k, v in figure.extra.items()]
    return "  ".join(parts)


def _record(
    plan: Plan,
    sash: Sash,
    peer: Contestant | None,
    agreement: dict[str, float],
    top: ceiling.Ceiling,
    figures: list[Figure],
    memory: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "command": "sash bench offline",
        # Nothing is drawn at random: greedy answers to a text that Python brings along.
        "seed": None,
        **circumstances(Path(__file__)),
        "model": plan.model,
        "dtype": plan.dtype,
        "repeats": plan.repeats,
        "threads": torch.get_num_threads(),
        "versions": {"sash": sash.version, "torch": torch.__version__} | ({peer.name: peer.version} if peer else {}),
        "perplexity_512": agreement,
        "ceiling": {"read_gb_per_s": top.read_bytes_per_s / 1e9, "gemm_gflop_per_s": top.gemm_flop_per_s / 1e9},
        "figures": [{"name": f.name, "sash": f.sash, "peer": f.peer, "ceiling": f.ceiling, **f.extra} for f in figures],
        "memory": memory,
    }
