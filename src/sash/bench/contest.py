"""sash as a benchmark drives it: token ids in, moments and tokens out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from sash import __version__
from sash.bench.ceiling import Precision
from sash.engine.llm import LLM
from sash.engine.outputs import RequestOutput
from sash.spec.config import DTYPE_BYTES
from sash.spec.errors import SashError
from sash.spec.sampling import SamplingParams


class Sash:
    """sash at its defaults but for the length and ``options`` (those of ``sash.spec.config.EngineConfig``).
    Greedy, no early end."""

    version = __version__

    def __init__(self, model: str, max_model_len: int, options: Mapping[str, Any]) -> None:
        self.llm = LLM(model, **{"max_model_len": max_model_len, **options})

    @property
    def precision(self) -> Precision:
        """In how many bytes weights and rows are kept, and in which type large products run."""
        config = self.llm.config
        # int4: half a byte, and two bytes of scale and two of least weight for every 32; the head stays int8.
        weights = {"int8": 1.0, "int4": 0.625, "none": float(DTYPE_BYTES[config.dtype])}[config.quantization]
        return Precision(weights, list(config.demand.dtypes), config.dtype if config.quantization == "none" else "int8")

    def answer(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        """Answer all prompts at once: the moment (``time.perf_counter``) when each had its first token, and the
        tokens.

        Raises:
            SashError: a request ended before its length was reached: no figure would mean anything.
        """
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        if len(prompts) == 1:
            return self._stream(prompts[0], params)
        started = time.perf_counter()
        outs = self.llm.generate([list(p) for p in prompts], params)
        for out in outs:
            _complete(out)
        first = max(out.metrics.first_token_s or 0.0 for out in outs)
        return started + first, [out.outputs[0].token_ids for out in outs]

    def _stream(self, prompt: Sequence[int], params: SamplingParams) -> tuple[float, list[list[int]]]:
        first, tokens = 0.0, []
        for delta in self.llm.stream(list(prompt), params):
            _complete(delta)
            first = first or time.perf_counter()
            tokens += delta.outputs[0].token_ids
        return first, [tokens]

    def score(self, tokens: Sequence[int]) -> list[float]:
        """-log p(token | tokens before), in nats, of tokens 1 …

        Raises:
            SashError: the request failed.
        """
        [out] = self.llm.generate([list(tokens)], SamplingParams(max_tokens=0, prompt_logprobs=0))
        _complete(out)
        return [-next(iter(entry.values())).logprob for entry in out.prompt_logprobs or [] if entry]


def _complete(out: RequestOutput) -> None:
    for answer in out.outputs:
        if answer.finish_reason not in (None, "length"):
            raise SashError(
                f"sash's own request ended with {answer.finish_reason} ({answer.error or 'no reason given'}): nothing "
                f"is measured; try shorter --cases, or sash generate with the same model to see what is wrong"
            )
