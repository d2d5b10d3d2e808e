"""transformers in bfloat16, with its own cache and scaled dot-product attention."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers

_ROWS = 256


class Engine:
    """See ``worker.Engine``."""

    def __init__(self, model: str, threads: int, context: int, requests: int, options: dict[str, Any]) -> None:
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.version = transformers.__version__
        self.settings = {"dtype": "bfloat16", "attention": "sdpa", "torch": torch.__version__, **options}
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        """See ``worker.Engine``."""
        cache = transformers.DynamicCache(config=self._model.config)
        token, first = torch.tensor(prompts), 0.0
        columns = []
        for _ in range(new_tokens):
            out = self._model(token, cache=cache, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            columns.append(token[:, 0].tolist())
            first = first or time.perf_counter()
        return first, [list(answer) for answer in zip(*columns, strict=True)]

    @torch.inference_mode()
    def score(self, tokens: list[int]) -> list[float]:
        """See ``worker.Engine``."""
        ids = torch.tensor(tokens)
        logits = self._model(ids[None], use_cache=False).logits[0]
        scores: list[float] = []
        for start in range(0, len(tokens) - 1, _ROWS):
            targets = ids[start + 1 : start + 1 + _ROWS]
            rows = logits[start : start + len(targets)].float()
            scores += torch.nn.functional.cross_entropy(rows, targets, reduction="none").tolist()
        return scores
