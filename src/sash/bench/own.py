"""Figures of sash that need no peer: start, memory, perplexity, and what time per token does as a request grows."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from sash.bench.contest import Sash
from sash.spec.errors import SashError

_PROMPT = "The window moves on with every token, and the page that it leaves behind is"
_MAIN = "import sys; from sash.cli.main import main; sys.argv[0] = 'sash'; main()"


def first_token_s(model: str, options: Mapping[str, Any], starts: int = 3) -> list[float]:
    """Seconds from the command ``sash generate`` to its first text, start by start, for a prompt of about 20 tokens.
    The first start may still fill caches.

    Raises:
        SashError: the command failed.
    """
    given = [item for name, value in options.items() for item in _option(name, value)]
    command = [sys.executable, "-c", _MAIN, "generate", model, _PROMPT, "--max-tokens", "2", *given]
    times = []
    for _ in range(starts):
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stderr is not None
            text = os.read(process.stdout.fileno(), 1)
            times.append(time.perf_counter() - started)
            process.stdout.read()
            message = process.stderr.read().decode(errors="replace").strip()
        if process.returncode or not text:
            raise SashError(f"sash generate failed: {message}; nothing is measured")
    return times


def _option(name: str, value: object) -> list[str]:
    """An engine option as the command line has it."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag] if value else []
    return [flag, str(value)]


def decode_step_s(sash: Sash, text: list[int], contexts: tuple[int, ...], steps: int = 32) -> dict[int, float]:
    """Seconds per token of one request that has so many tokens behind it, the whole model, by context."""
    out = {}
    for context in contexts:
        first, _ = sash.answer([text[:context]], steps + 1)
        out[context] = (time.perf_counter() - first) / steps
    return out
