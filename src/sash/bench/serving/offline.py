"""The engine without a server, in a process of its own, asked as a peer is (``sash.bench.peers.process.Worker``)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import statistics
import sys
import time
from typing import Any

from sash.bench.peers.workers.worker import serve


class Service:
    """Answers requests about engines that differ in how many requests they run at once."""

    def __init__(self) -> None:
        self._engines: dict[int, Any] = {}

    def load(self, model: str, context: int, requests: list[int], threads: int) -> dict[str, Any]:
        """Build an engine for each number of requests."""
        import torch

        from sash import LLM

        torch.set_num_threads(threads)
        for count in requests:
            self._engines[count] = LLM(model, max_num_seqs=count, max_model_len=context, threads=threads)
        return {}

    def batch(self, requests: int, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """Tokens a second of answers to all prompts, ``requests`` at a time, from the first to the last."""
        from sash import SamplingParams

        llm = self._engines[requests]
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        llm.generate([prompts[0][:16]], SamplingParams(max_tokens=2, ignore_eos=True))
        started = time.perf_counter()
        outputs = llm.generate(prompts, params)
        took = time.perf_counter() - started
        return {"rate": sum(len(o.outputs[0].token_ids) for o in outputs) / took, "took_s": took}

    def latency(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """Medians over prompts that run alone: seconds to the first token, and for each further one."""
        from sash import SamplingParams

        llm = next(iter(self._engines.values()))
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        firsts, others = [], []
        for prompt in prompts:
            started = time.perf_counter()
            times = [time.perf_counter() for _ in llm.stream(prompt, params)]
            firsts.append(times[0] - started)
            others.append((times[-1] - times[0]) / max(len(times) - 1, 1))
        return {"first_s": statistics.median(firsts), "token_s": statistics.median(others)}


def main() -> None:
    """Serve on the real standard output; everything else that is printed goes to standard error."""
    with contextlib.suppress(OSError, AttributeError):  # Linux only: end with the parent, however it ends
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(Service(), sys.stdin, answers)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
