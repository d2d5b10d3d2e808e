"""One engine in a process of its own, asked in JSON lines: ``python worker.py ADAPTER``.

Runs in a peer's environment, so it and the ``adapter_…`` files beside it import nothing of sash (but for sash's own).
A line in is {"do": "load" | "run" | "score", …}, its other keys the arguments; a line out is {"ok": …} or
{"error": "…"}. Whatever an engine prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback
from typing import Any, Protocol, TextIO

_WARM_UP = 16


class Engine(Protocol):
    """What an adapter's class ``Engine`` offers. It is built from (model, threads, context, requests, options):
    ``context`` tokens of all requests that run together must fit, at most ``requests`` of them. Greedy, no early
    end, nothing cached from one request to the next."""

    version: str
    # What a reader needs to know to repeat it.
    settings: dict[str, Any]

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        """Answer all prompts (of equal length) together: the moment (``time.perf_counter``) when each had its
        first token, and every answer's tokens."""

    def score(self, tokens: list[int]) -> list[float]:
        """-log p(token | tokens before), in nats, of tokens 1 …"""


class Service:
    """Answers requests about one engine."""

    def __init__(self, adapter: str) -> None:
        self._adapter = adapter
        self._engine: Engine | None = None

    def load(self, **arguments: Any) -> dict[str, Any]:
        """Build the engine; its version and settings."""
        engine: Engine = importlib.import_module(self._adapter).Engine(**arguments)
        self._engine = engine
        return {"version": engine.version, "settings": engine.settings}

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """Seconds to the first tokens, seconds for the rest, and the tokens. A short request goes first: every
        engine starts with its threads awake and what it makes for that many prompts made."""
        assert self._engine is not None, "load comes first"
        self._engine.run([prompt[:_WARM_UP] for prompt in prompts], 4)
        started = time.perf_counter()
        first, tokens = self._engine.run(prompts, new_tokens)
        ended = time.perf_counter()
        if [len(answer) for answer in tokens] != [new_tokens] * len(prompts):
            raise RuntimeError(f"wanted {new_tokens} tokens for each of {len(prompts)} prompts, got {tokens}")
        return {"prefill_s": first - started, "decode_s": ended - first, "tokens": tokens}

    def score(self, tokens: list[int]) -> dict[str, Any]:
        """Negative log-likelihood of every token but the first."""
        assert self._engine is not None, "load comes first"
        return {"nll": self._engine.score(tokens)}


def serve(service: Service, requests: TextIO, answers: TextIO) -> None:
    """Answer until the requests end."""
    for line in requests:
        request = json.loads(line)
        try:
            answer = {"ok": getattr(service, request.pop("do"))(**request)}
        except Exception as error:  # an engine may raise anything; the parent decides
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """Serve on the real standard output; everything else that is printed goes to standard error."""
    with contextlib.suppress(OSError, AttributeError):  # Linux only: end with the parent, however it ends
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(Service(sys.argv[1]), sys.stdin, answers)


if __name__ == "__main__":
    main()
