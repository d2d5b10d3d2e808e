"""Contestants: sash and its peers behind one small interface, driven with the same token ids."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sash.engine.llm import LLM
from sash.engine.outputs import RequestOutput
from sash.spec.errors import ConfigError, SashError
from sash.spec.locate import locate
from sash.spec.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Timing:
    """One request: seconds to the first token, seconds for the ones after it, and all of them."""

    prefill_s: float
    decode_s: float
    tokens: tuple[int, ...]


class Contestant(Protocol):
    """What a benchmark asks of an engine. Greedy, no early end."""

    name: str
    version: str

    def run(self, prompt: Sequence[int], new_tokens: int) -> Timing:
        """Answer one prompt with nothing cached from before."""

    def negative_log_likelihood(self, tokens: Sequence[int]) -> float:
        """Mean over tokens 1 … of -log p(token | tokens before), in nats.

        Raises SashError when the request failed.
        """


class Sash:
    """sash itself, at its defaults but for the length."""

    name = "sash"

    def __init__(self, model: str, dtype: str, max_model_len: int) -> None:
        from sash import __version__

        self.version = __version__
        self.llm = LLM(model, dtype=dtype, max_model_len=max_model_len)

    def run(self, prompt: Sequence[int], new_tokens: int) -> Timing:
        """See ``Contestant``."""
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        started = time.perf_counter()
        first, tokens = 0.0, []
        for delta in self.llm.stream(list(prompt), params):
            _complete(delta)
            first = first or time.perf_counter()
            tokens += delta.outputs[0].token_ids
        return Timing(first - started, time.perf_counter() - first, tuple(tokens))

    def run_batch(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        """Seconds for all prompts at once."""
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        started = time.perf_counter()
        for out in self.llm.generate([list(p) for p in prompts], params):
            _complete(out)
        return time.perf_counter() - started

    def negative_log_likelihood(self, tokens: Sequence[int]) -> float:
        """See ``Contestant``."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        [out] = self.llm.generate([list(tokens)], params)
        _complete(out)
        scores = [next(iter(p.values())).logprob for p in out.prompt_logprobs or [] if p]
        return -sum(scores) / len(scores)


def _complete(out: RequestOutput) -> None:
    """Raises SashError when a request ended before its length was reached: no figure would mean anything."""
    for answer in out.outputs:
        if answer.finish_reason not in (None, "length"):
            raise SashError(
                f"sash's own request ended with {answer.finish_reason} ({answer.error or 'no reason given'}): nothing "
                f"is measured; try a shorter --lengths, or sash generate with the same model to see what is wrong"
            )


class Transformers:
    """transformers with its own cache and scaled dot-product attention."""

    name = "transformers"

    def __init__(self, model: str, dtype: str) -> None:
        try:
            import transformers
        except ImportError as error:
            raise ConfigError(
                "transformers is not installed: pip install 'sash-llm[test]', or use --against none"
            ) from error
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.version = transformers.__version__
        source = locate(model)
        kwargs: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
        folder = source.path
        if source.kind == "gguf":
            folder, kwargs["gguf_file"] = source.path.parent, source.path.name
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()
        self._cache = transformers.DynamicCache

    @torch.inference_mode()
    def run(self, prompt: Sequence[int], new_tokens: int) -> Timing:
        """See ``Contestant``."""
        cache = self._cache(config=self._model.config)
        started = time.perf_counter()
        out = self._model(torch.tensor([list(prompt)]), cache=cache, logits_to_keep=1)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        first, tokens = time.perf_counter(), [int(token)]
        for _ in range(new_tokens - 1):
            out = self._model(token, cache=cache)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(int(token))
        return Timing(first - started, time.perf_counter() - first, tuple(tokens))

    @torch.inference_mode()
    def negative_log_likelihood(self, tokens: Sequence[int]) -> float:
        """See ``Contestant``."""
        ids = torch.tensor(list(tokens))
        logits = self._model(ids[None]).logits[0, :-1].float()
        return float(torch.nn.functional.cross_entropy(logits, ids[1:]))
