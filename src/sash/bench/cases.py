"""What is timed: a case is requests that run together; its figures come from repeated timings."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sash.bench.ceiling import Ceiling, Precision, decode_ceiling, prefill_ceiling
from sash.spec.errors import ConfigError
from sash.spec.model import ModelSpec

_ANSWER = 64
_SHORT_PROMPT = 16
# By the model's name; what a model lacks room for is refused by the engines.
DEFAULT_CASES = {"smollm2-135m": "512,4096"}
USUAL_CASES = "512,4096,16384,8x256,16x256"
QUICK_CASES = "512,8x32"


@dataclass(frozen=True, slots=True)
class Case:
    """``requests`` prompts of ``prompt`` tokens at once, each answered with ``new_tokens`` tokens."""

    prompt: int
    new_tokens: int
    requests: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of all requests at their end."""
        return self.requests * (self.prompt + self.new_tokens)

    @property
    def kinds(self) -> tuple[str, ...]:
        """One request gives two figures; a batch gives one, its prompts included."""
        return ("prefill", "decode") if self.requests == 1 else ("batch",)

    def prompts(self, text: Sequence[int]) -> list[list[int]]:
        """Neighbouring pieces of a text, one a request, each behind the text's first token (where a model has one,
        its BOS: answers without it are noise)."""
        n = self.prompt - 1
        return [[text[0], *text[1 + i * n : 1 + i * n + n]] for i in range(self.requests)]

    def rate(self, kind: str, timing: Timing) -> float:
        """Tokens per second."""
        if kind == "prefill":
            return self.prompt / timing.prefill_s
        if kind == "decode":
            return (self.new_tokens - 1) / timing.decode_s
        return self.requests * self.new_tokens / (timing.prefill_s + timing.decode_s)

    def name(self, kind: str) -> str:
        """The figure's name, for people."""
        if kind == "batch":
            return f"{self.requests} requests x {self.new_tokens}"
        return f"prefill {self.prompt}" if kind == "prefill" else f"decode after {self.prompt}"

    def ceiling(self, kind: str, top: Ceiling, spec: ModelSpec, precision: Precision) -> float:
        """Tokens per second that this machine's memory and products allow."""
        if kind == "prefill":
            return prefill_ceiling(top, spec, precision, self.prompt)
        return decode_ceiling(top, spec, precision, self.prompt + self.new_tokens // 2, self.requests)


@dataclass(frozen=True, slots=True)
class Timing:
    """One run of a case: seconds until every request had its first token, and seconds for the rest."""

    prefill_s: float
    decode_s: float


def parse_cases(text: str) -> tuple[Case, ...]:
    """``512`` is one request after 512 tokens; ``8x256`` is eight with short prompts and 256 tokens each.

    Raises:
        ConfigError: another form, or none at all.
    """
    cases = []
    for item in filter(None, (item.strip() for item in text.split(","))):
        match = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)", item)
        if not match or (match[1] and (int(match[1]) < 2 or int(match[2]) < 2)):
            raise ConfigError(
                f"--cases must be prompt lengths (512) or requests x tokens (8x256) between commas; got {item!r}"
            )
        length = int(match[2])
        cases.append(Case(_SHORT_PROMPT, length, int(match[1])) if match[1] else Case(length, _ANSWER))
    if not cases:
        raise ConfigError(f"--cases must name at least one, such as {QUICK_CASES}")
    return tuple(cases)


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, extremes and number of repeated measurements."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "runs": len(values)}


def figures(
    case: Case, timings: dict[str, list[Timing]], ceiling: Callable[[Case, str], float]
) -> list[dict[str, Any]]:
    """The case's figures as a record has them: sash, the peers by name, and the ratio to the best of them."""
    out = []
    for kind in case.kinds:
        rates = {name: summary([case.rate(kind, t) for t in runs]) for name, runs in timings.items() if runs}
        figure: dict[str, Any] = {
            "name": case.name(kind),
            "kind": kind,
            "prompt": case.prompt,
            "requests": case.requests,
            "new_tokens": case.new_tokens,
            "unit": "tok/s",
            "sash": rates.pop("sash"),
            "peers": rates,
            "ceiling": ceiling(case, kind),
        }
        if rates:
            best = max(rates, key=lambda name: float(rates[name]["median"]))
            figure |= {"best_peer": best, "ratio": figure["sash"]["median"] / rates[best]["median"]}
        out.append(figure)
    return out


def line(figure: dict[str, Any]) -> str:
    """One figure for people."""
    own = figure["sash"]
    parts = [f"{figure['name']:20s} {own['median']:9.1f} tok/s ({own['low']:.1f} to {own['high']:.1f})"]
    parts += [f"{name} {rate['median']:.1f}" for name, rate in figure["peers"].items()]
    if "ratio" in figure:
        parts.append(f"ratio {figure['ratio']:.2f} to {figure['best_peer']}")
    parts.append(f"ceiling {figure['ceiling']:.1f} ({100 * own['median'] / figure['ceiling']:.0f} %)")
    return "  ".join(parts)
