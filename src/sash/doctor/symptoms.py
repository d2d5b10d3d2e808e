"""The questions that checks answer, and for each symptom the order in which to ask them. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sash.doctor.finding import Finding
from sash.spec.errors import ConfigError

# Names of checks with the question each answers, in the order in which all of them are told.
CHECKS = {
    "alive": "Does the server answer, and is its engine alive?",
    "length-limited": "Is the length of requests limited to what memory and model bear?",
    "cache-bounded": "Does KV memory stop growing at the window, and come back at the end?",
    "memory-line": "How much does each further token cost?",
    "window-used": "Do window layers store windows, or full length behind a mask?",
    "reference-window": "Does anything grow with the answer that need not?",
    "pool-split": "Do the pools run out together?",
    "rows-survive": "Is each row there as long as a query can see it?",
    "mask-edge": "Does the window end where it should, to the row?",
    "mask-by-position": "Does the mask compare positions, not slots?",
    "positions-absolute": "Do keys bear the angle of their absolute position?",
    "exact": "Are scores past the window those of a dense run?",
    "chunk-edge": "Are they right behind the edge between two chunks of a prompt?",
    "batch-isolated": "Do requests that run together leave each other alone?",
    "recall": "Are facts found before and behind the window?",
    "reach": "How far back can any token look?",
    "no-copies": "Is anything copied in each step?",
    "kernels": "Do the quick kernels run?",
    "time": "Where does a step's time go?",
    "latency": "How do waiting and time per token grow with the prompt?",
    "chunk-and-window": "Are chunks of prompts long enough for the window?",
    "short-text": "From which length on does a window gain anything?",
    "queue": "Who waits, and for what?",
    "preemptions": "Were answers interrupted because pages ran out?",
    "rejected": "What was refused or ignored, and why?",
    "failures": "Did steps, requests or the engine fail?",
    "slow-requests": "Which requests took long?",
}

SYMPTOMS: dict[str, tuple[str, ...]] = {
    "repeats": (
        "reach",
        "positions-absolute",
        "mask-by-position",
        "mask-edge",
        "rows-survive",
        "chunk-edge",
        "batch-isolated",
        "exact",
        "length-limited",
    ),
    "memory": (
        "length-limited",
        "cache-bounded",
        "memory-line",
        "window-used",
        "pool-split",
        "queue",
        "preemptions",
        "rejected",
    ),
    "kv-grows": ("reference-window", "cache-bounded", "window-used", "memory-line", "length-limited"),
    "slow": (
        "no-copies",
        "kernels",
        "time",
        "latency",
        "window-used",
        "chunk-and-window",
        "queue",
        "preemptions",
        "pool-split",
        "slow-requests",
    ),
    "edge-facts": ("reach", "mask-edge", "chunk-edge", "rows-survive", "recall", "exact"),
    "batch": ("batch-isolated", "rows-survive", "queue", "pool-split"),
    "refused": ("alive", "rejected", "queue", "pool-split", "length-limited", "failures"),
    "myths": ("window-used", "memory-line", "short-text", "reach", "recall"),
}
# What the documents and people call them.
ALIASES = {
    "degrades": "repeats",
    "oom": "memory",
    "out-of-memory": "memory",
    "latency": "slow",
    "edge": "edge-facts",
    "forgets": "edge-facts",
    "kv": "kv-grows",
    "errors": "refused",
    "misconceptions": "myths",
}


def order_of(symptom: str | None) -> tuple[str, ...]:
    """Checks to ask for a symptom, in order; all of them without one.

    Raises:
        ConfigError: an unknown symptom.
    """
    if symptom is None:
        return tuple(CHECKS)
    name = ALIASES.get(symptom, symptom)
    if name not in SYMPTOMS:
        raise ConfigError(f"--symptom {symptom!r} is unknown; use {', '.join(SYMPTOMS)}")
    return SYMPTOMS[name]


def ordered(findings: Iterable[Finding], order: Sequence[str]) -> list[Finding]:
    """Those of the checks in ``order``, in that order."""
    return sorted((f for f in findings if f.name in order), key=lambda f: order.index(f.name))
