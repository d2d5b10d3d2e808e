"""What can be seen of any engine from outside: memory by length where it is told, latency by length, recall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sash.doctor.finding import Finding, Status, ok, skipped

LATENCY, RECALL, LINE = "latency", "recall", "memory-line"
# Words of one token in most vocabularies.
_TEXT = "the river runs past old stone houses and the people there talk about rain and bread and horses"
_CODE = "7 4 1 9"
_ANSWER = 8


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer: prompt tokens, seconds to its first token and between the others, bytes of KV if they are known."""

    prompt_tokens: int
    first_s: float
    per_token_s: float
    kv_bytes: int | None = None


class Outside(Protocol):
    """An engine that answers texts."""

    @property
    def tokens_per_word(self) -> float:
        """Of ``filler``."""

    def timed(self, prompt: str, max_tokens: int) -> Timed:
        """Answer greedily and take the time."""

    def answer(self, prompt: str, max_tokens: int) -> str:
        """Answer greedily."""


def filler(tokens: int, tokens_per_word: float = 1.0) -> str:
    """A text of about so many tokens."""
    words = max(int(tokens / tokens_per_word), 1)
    text = _TEXT.split()
    return " ".join(text[i % len(text)] for i in range(words))


def latency_finding(engine: Outside, lengths: Sequence[int], repeats: int = 2) -> tuple[Finding, list[Timed]]:
    """Time by length of the prompt. A token of a long text may cost more; ten times as much is told."""
    found = []
    for length in lengths:
        runs = [engine.timed(f"{n} {filler(length, engine.tokens_per_word)}", 2 * _ANSWER) for n in range(repeats)]
        found.append(min(runs, key=lambda t: t.per_token_s))
    told = "; ".join(
        f"{t.prompt_tokens} tokens: first after {t.first_s * 1000:.0f} ms, then {t.per_token_s * 1000:.1f} ms each"
        for t in found
    )
    first, last = found[0], found[-1]
    growth = last.per_token_s / max(first.per_token_s, 1e-9)
    if len(found) > 1 and growth > 10 and last.per_token_s > 0.01:
        return (
            Finding(
                LATENCY,
                Status.WARN,
                told,
                f"a token costs {growth:.0f} times as much behind the long prompt: the whole text is read, or copied, "
                f"for each token",
                "sash doctor MODEL --symptom slow shows whether window layers store windows and what is copied",
            ),
            found,
        )
    return ok(LATENCY, told), found


def line_finding(found: Sequence[Timed], window: int | None) -> Finding:
    """Bytes by length, where they are known."""
    known = [t for t in found if t.kv_bytes is not None]
    if len(known) < 2:
        return skipped(LINE, "the engine does not tell its KV memory")
    told = "; ".join(f"{t.prompt_tokens} tokens {(t.kv_bytes or 0) / 2**20:.2f} MiB" for t in known)
    a, b = known[-2], known[-1]
    slope = ((b.kv_bytes or 0) - (a.kv_bytes or 0)) / max(b.prompt_tokens - a.prompt_tokens, 1)
    seen = f"{told}: {slope / 1024:.2f} KiB a token at the end"
    return ok(LINE, seen if window is None else f"{seen} (windows of {window})")


def recall_finding(engine: Outside, near: int, far: int, what: str) -> Finding:
    """Whether a fact is found ``near`` tokens and ``far`` tokens back. ``what`` tells what lies between the two.

    A model that can't repeat a fact from nearby tells nothing by failing at a distance.
    """
    hits = {}
    for distance in (near, far):
        prompt = f"The code is {_CODE}. {filler(distance, engine.tokens_per_word)}. Remember: the code is"
        hits[distance] = _CODE.replace(" ", "") in engine.answer(prompt, 12).replace(" ", "")
    seen = ", ".join(f"{tokens} tokens back: {'found' if hit else 'not found'}" for tokens, hit in hits.items())
    if not hits[near]:
        return skipped(RECALL, f"a fact {seen}; this model repeats no fact even from nearby, so distance tells nothing")
    if hits[far]:
        return ok(RECALL, f"a fact {seen} ({what})")
    return ok(
        RECALL,
        f"a fact {seen} ({what}): pure windows lose distant facts, and small models lose them in full attention too",
    )
