"""llama.cpp on the GGUF file as it is, through its C interface, with its window cache at the window's size."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

_BATCH = 512
_SCORED = 128


class Engine:
    """See ``worker.Engine``."""

    def __init__(self, model: str, threads: int, context: int, requests: int, options: dict[str, Any]) -> None:
        self.version = llama_cpp.__version__
        self.settings = {"n_batch": _BATCH, "flash_attn": "auto", "swa_full": False, "kv": "f16", **options}
        self._threads, self._tokens = threads, context
        llama_cpp.llama_log_set(_quiet, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp can't load {model}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        self._contexts: dict[int, Any] = {}

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        """See ``worker.Engine``."""
        context = self._context(len(prompts))
        answers: list[list[int]] = [[] for _ in prompts]
        rows = [(t, i, s, i == len(p) - 1) for s, p in enumerate(prompts) for i, t in enumerate(p)]
        for start in range(0, len(rows), _BATCH):
            for sequence, logits in self._decode(context, rows[start : start + _BATCH]):
                answers[sequence].append(int(logits.argmax()))
        first = time.perf_counter()
        for step in range(new_tokens - 1):
            rows = [(a[-1], len(p) + step, s, True) for s, (p, a) in enumerate(zip(prompts, answers, strict=True))]
            for sequence, logits in self._decode(context, rows):
                answers[sequence].append(int(logits.argmax()))
        return first, answers

    def score(self, tokens: list[int]) -> list[float]:
        """See ``worker.Engine``."""
        context = self._context(1)
        scores: list[float] = []
        rows = [(t, i, 0, True) for i, t in enumerate(tokens[:-1])]
        for start in range(0, len(rows), _SCORED):
            targets = tokens[start + 1 : start + 1 + _SCORED]
            decoded = self._decode(context, rows[start : start + _SCORED])
            for target, (_, logits) in zip(targets, decoded, strict=True):
                peak = logits.max()
                scores.append(float(peak + np.log(np.exp(logits - peak).sum()) - logits[target]))
        return scores

    def _context(self, sequences: int) -> Any:
        """An empty context for so many sequences; made once for each number of them."""
        if sequences not in self._contexts:
            params = llama_cpp.llama_context_default_params()
            params.n_ctx = self._tokens
            params.n_batch = params.n_ubatch = _BATCH
            params.n_seq_max = sequences
            params.n_threads = params.n_threads_batch = self._threads
            params.swa_full = False
            made = llama_cpp.llama_init_from_model(self._model, params)
            if not made:
                raise RuntimeError(f"llama.cpp can't make a context of {self._tokens} tokens for {sequences} sequences")
            self._contexts[sequences] = made
        context = self._contexts[sequences]
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        return context

    def _decode(self, context: Any, rows: Sequence[tuple[int, int, int, bool]]) -> list[tuple[int, np.ndarray]]:
        """One step over rows (token, position, sequence, wanted): each wanted row's sequence and logits."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        status = llama_cpp.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        return [
            (s, np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (self._vocab_size,)))
            for i, (_, _, s, wanted) in enumerate(rows)
            if wanted
        ]


@llama_cpp.llama_log_callback
def _quiet(level: int, text: bytes, data: Any) -> None:
    """Drop what llama.cpp logs below errors."""
    if level >= 4:
        print(text.decode(errors="replace"), end="")
