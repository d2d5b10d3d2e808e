"""What can be seen of a model that transformers runs: bytes of its cache by length, latency, recall."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import pairwise
from typing import Any

import torch

from sash.doctor.finding import Finding, Status, ok
from sash.doctor.outside import Timed, filler, latency_finding, line_finding, recall_finding
from sash.spec.errors import ConfigError, ModelError

USED = "window-used"


@dataclass
class Theirs:
    """A causal model of transformers with its tokenizer, as ``sash.doctor.outside.Outside`` knows engines."""

    model: Any
    tokenizer: Any

    @property
    def tokens_per_word(self) -> float:
        """Of the filler."""
        return max(self._ids(filler(40)).shape[1] / 40, 1.0)

    def _ids(self, prompt: str) -> torch.Tensor:
        ids: torch.Tensor = self.tokenizer(prompt, return_tensors="pt").input_ids
        return ids

    @torch.inference_mode()
    def _steps(self, ids: torch.Tensor, count: int) -> tuple[list[int], list[float], Any]:
        """Greedy tokens, the times at which they came, and the cache."""
        import transformers

        tokens, times = list[int](), list[float]()
        cache = transformers.DynamicCache(config=self.model.config)
        # Newer versions call it so.
        name = "cache" if "cache" in signature(type(self.model).forward).parameters else "past_key_values"
        for _ in range(count):
            ids = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{name: cache}).logits[:, -1:].argmax(-1)
            tokens.append(int(ids))
            times.append(time.perf_counter())
        return tokens, times, cache

    def timed(self, prompt: str, max_tokens: int) -> Timed:
        """Answer greedily, take the time and weigh the cache."""
        ids, started = self._ids(prompt), time.perf_counter()
        _, times, cache = self._steps(ids, max_tokens)
        gaps = sorted(b - a for a, b in pairwise(times))
        kv = sum(t.numel() * t.element_size() for t in cache_tensors(cache))
        return Timed(ids.shape[1], times[0] - started, gaps[len(gaps) // 2] if gaps else 0.0, kv)

    def answer(self, prompt: str, max_tokens: int) -> str:
        """Answer greedily."""
        text: str = self.tokenizer.decode(self._steps(self._ids(prompt), max_tokens)[0])
        return text


def cache_tensors(cache: Any) -> Iterator[torch.Tensor]:
    """Keys and values of a transformers cache: of its layers, or of the older tuple of pairs."""
    for layer in getattr(cache, "layers", cache):
        pair = (layer.keys, layer.values) if hasattr(layer, "keys") and hasattr(layer, "values") else layer
        yield from (t for t in pair if isinstance(t, torch.Tensor))


def open_theirs(model: str) -> Theirs:
    """Load a model by transformers.

    Raises:
        ConfigError: transformers isn't installed.
        ModelError: it can't load the model.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("--transformers needs the package: pip install transformers") from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"transformers can't load {model!r}: {error}") from error
    return Theirs(theirs, tokenizer)


def examine_theirs(theirs: Theirs, lengths: Sequence[int] | None = None) -> list[Finding]:
    """Memory line, latency by length and recall past the window."""
    config = theirs.model.config.get_text_config()
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    limit = int(getattr(config, "max_position_embeddings", 4096)) - 24
    middle = min(max(window or 256, 32), limit // 2)
    latency, times = latency_finding(theirs, sorted(lengths or {16, middle, min(3 * middle, limit // 2)}))
    far = min(2 * window if window else 3 * middle, limit // 2)
    recall = recall_finding(theirs, min(16, middle), far, f"the window is {window}" if window else "no window is told")
    return [line_finding(times, window), _used(theirs, window), latency, recall]


def _used(theirs: Theirs, window: int | None) -> Finding:
    """Whether layers with a window store only that."""
    if not window:
        return ok(USED, "the configuration has no window, so there is nothing that a ring could save")
    longest = 2 * window + 8
    ids = torch.arange(longest)[None] % int(theirs.model.config.get_text_config().vocab_size)
    cache = theirs._steps(ids, 2)[2]
    kinds = getattr(theirs.model.config.get_text_config(), "layer_types", None) or ["sliding_attention"]
    rows = [t.shape[-2] for t in cache_tensors(cache)][::2]
    kinds = kinds if len(kinds) == len(rows) else kinds * len(rows)
    sliding = [count for count, kind in zip(rows, kinds, strict=False) if kind == "sliding_attention"]
    most = max(sliding, default=0)
    seen = f"after {longest + 1} tokens: {len(sliding)} layers with a window of {window} store {most} rows"
    if most > window + 1:
        return Finding(
            USED,
            Status.WARN,
            f"{seen} each",
            "a window mask over full storage saves no memory",
            "sash generate MODEL stores windows only",
        )
    return ok(USED, seen)
