"""sash itself, at its defaults but for the length and what --engine-option says."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from sash.bench.contest import Sash


class Engine:
    """See ``worker.Engine``."""

    def __init__(self, model: str, threads: int, context: int, requests: int, options: dict[str, Any]) -> None:
        torch.set_num_threads(threads)
        self._sash = Sash(model, context, options)
        self.version = self._sash.version
        self.settings = {"precision": asdict(self._sash.precision), "torch": torch.__version__, **options}

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        """See ``worker.Engine``."""
        return self._sash.answer(prompts, new_tokens)

    def score(self, tokens: list[int]) -> list[float]:
        """See ``worker.Engine``."""
        return self._sash.score(tokens)
