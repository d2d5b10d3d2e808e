"""OpenVINO GenAI with int8 weights, through its continuous batching pipeline; other settings are its own defaults."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai


class Engine:
    """See ``worker.Engine``."""

    def __init__(self, model: str, threads: int, context: int, requests: int, options: dict[str, Any]) -> None:
        self.version = openvino_genai.__version__.split("-")[0]
        self.settings = {"weights": "int8", "max_num_batched_tokens": context, "prefix_caching": False, **options}
        scheduler = openvino_genai.SchedulerConfig()
        # As its simple pipeline has it: a prompt in one piece.
        scheduler.max_num_batched_tokens = context
        scheduler.max_num_seqs = requests
        scheduler.cache_size = 1
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads, **options}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._ids = itertools.count()

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        """See ``worker.Engine``."""
        handles = [self._add(prompt, max_new_tokens=new_tokens) for prompt in prompts]
        answers: list[list[int]] = [[] for _ in prompts]
        first = 0.0
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for handle, answer in zip(handles, answers, strict=True):
                while handle.can_read():
                    answer += handle.read()[0].generated_ids
            if not first and all(answers):
                first = time.perf_counter()
        return first, answers

    def score(self, tokens: list[int]) -> list[float]:
        """See ``worker.Engine``."""
        handle = self._add(tokens, max_new_tokens=1, echo=True, logprobs=1)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        [answer] = handle.read_all()
        return [-x for x in answer.generated_log_probs[1 : len(tokens)]]

    def _add(self, prompt: list[int], **settings: Any) -> Any:
        config = openvino_genai.GenerationConfig()
        for name, value in {"ignore_eos": True, "do_sample": False, **settings}.items():
            setattr(config, name, value)
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        return self._pipeline.add_request(next(self._ids), ids, config)
