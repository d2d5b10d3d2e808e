"""vLLM on the CPU in bfloat16, asked through its engine's step loop; prefix caching off."""

from __future__ import annotations

import itertools
import time
from typing import Any

import vllm


class Engine:
    """See ``worker.Engine``."""

    def __init__(self, model: str, threads: int, context: int, requests: int, options: dict[str, Any]) -> None:
        self.version = vllm.__version__
        self.settings = {"dtype": "bfloat16", "prefix_caching": False, **options}
        self._llm = vllm.LLM(
            model,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=context,
            max_num_seqs=requests,
            enable_prefix_caching=False,
            max_logprobs=1,
            **options,
        )
        self._ids = itertools.count()

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        """See ``worker.Engine``."""
        params = vllm.SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        answers, first = self._answer(prompts, params)
        return first, [list(answer.outputs[0].token_ids) for answer in answers]

    def score(self, tokens: list[int]) -> list[float]:
        """See ``worker.Engine``."""
        params = vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        [answer], _ = self._answer([tokens], params)
        entries = zip(tokens[1:], answer.prompt_logprobs[1:], strict=True)
        return [-entry[token].logprob for token, entry in entries]

    def _answer(self, prompts: list[list[int]], params: Any) -> tuple[list[Any], float]:
        """Every prompt's whole answer, and the moment when each had its first token."""
        engine = self._llm.llm_engine
        names = [str(next(self._ids)) for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        latest: dict[str, Any] = {}
        first = 0.0
        while engine.has_unfinished_requests():
            for answer in engine.step():
                latest[answer.request_id] = answer
            if not first and len(latest) == len(prompts):
                first = time.perf_counter()
        return [latest[name] for name in names], first
