"""Memory of one request at one length, in a process of its own: ``python -m sash.bench.memory …``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def resident_bytes() -> int:
    """Resident memory of this process, mapped files included (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmRSS")


def measure(model: str, tokens: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Run one request of ``tokens`` tokens; bytes of its pages per pool, and of the process."""
    from sash.engine.llm import LLM
    from sash.spec.sampling import SamplingParams

    llm = LLM(model, **{"max_model_len": max(tokens + 16, 2048), **options})
    prompt = [2, *(5 + i % 20_000 for i in range(tokens - 1))]
    llm.generate(prompt, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    pool_bytes = {pool["name"]: pool["peak_pages"] * pool["page_bytes"] for pool in llm.stats()["pools"]}
    return {"tokens": tokens, "pool_bytes": pool_bytes, "resident_bytes": resident_bytes()}


def measure_apart(model: str, tokens: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """``measure`` in a fresh process, so that earlier work doesn't count."""
    command = [sys.executable, "-m", "sash.bench.memory", model, str(tokens), json.dumps(dict(options))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))))
