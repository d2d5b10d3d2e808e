"""A prompt's log-probabilities through a whole engine, without a tokenizer."""

from __future__ import annotations

import torch

from sash.engine.build import Built
from sash.engine.frontend import Frontend
from sash.spec.sampling import SamplingParams


def prompt_scores(built: Built, ids: list[int]) -> torch.Tensor:
    """Of each token but the first, after those before it: [len(ids) - 1]."""
    front = Frontend(built.spec, None, seed=0)
    request = front.open(ids, SamplingParams(max_tokens=0, prompt_logprobs=0))
    built.core.add(request.message)
    front.started(request)
    while not request.whole.finished:
        for update in built.core.step():
            front.take(update)
    found = request.whole.prompt_logprobs
    assert found is not None
    return torch.tensor([position[i].logprob for position, i in zip(found, ids, strict=True) if position])
