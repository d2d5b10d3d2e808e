"""The committed answers of transformers, and what it means to continue as they do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sash import LLM, RequestOutput, SamplingParams

FIXTURES = Path(__file__).parents[1] / "fixtures"
# Half of the last digit that the fixture keeps of a gap and of a log-probability.
GAP_ROUNDING, LOGPROB_ROUNDING = 5e-5, 5e-6


@dataclass(frozen=True)
class Case:
    """A prompt and the oracle's greedy answer: per token the top-two gap, max |logit| and its log-probability."""

    name: str
    ids: list[int]
    tokens: list[int]
    gaps: list[float]
    max_logits: list[float]
    logprobs: list[float]

    def tolerance(self, step: int) -> float:
        """By how much logits may differ (float32, unquantised)."""
        return 1e-4 * max(1.0, self.max_logits[step])

    def tie(self, step: int) -> bool:
        """Whether the oracle's two best tokens are too near to tell apart."""
        return self.gaps[step] < 2 * self.tolerance(step) + GAP_ROUNDING


@cache
def cases(model: str) -> dict[str, Case]:
    """The oracle's answers by name of the prompt."""
    text = (FIXTURES / f"oracle_{model.replace('-', '_')}.json").read_text()
    return {entry["name"]: Case(**entry) for entry in json.loads(text)["prompts"]}


def greedy(num_tokens: int) -> SamplingParams:
    """Greedy answers of so many tokens, with each token's log-probability."""
    return SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, logprobs=0)


def continue_and_compare(llm: LLM, chosen: list[Case]) -> None:
    """Answer the prompts in one batch and hold each answer against the oracle's."""
    outputs = llm.generate([case.ids for case in chosen], greedy(len(chosen[0].tokens)))
    for case, output in zip(chosen, outputs, strict=True):
        assert_continues(llm, case, output)


def assert_continues(llm: LLM, case: Case, request: RequestOutput) -> None:
    """Tokens are the oracle's up to its first tie, log-probabilities all along; past a tie, teacher-forced."""
    output = request.outputs[0]
    assert output.finish_reason == "length", output
    assert output.logprobs is not None
    got, wanted = output.token_ids, case.tokens
    assert len(got) == len(wanted)
    for step, (token, expected) in enumerate(zip(got, wanted, strict=True)):
        if token != expected:
            assert case.tie(step), f"{case.name}: token {step} is {token}, not {expected}, gap {case.gaps[step]}"
            assert_teacher_forced(llm, case)
            return
        _assert_near(case, step, output.logprobs[step][token].logprob)


def assert_teacher_forced(llm: LLM, case: Case) -> None:
    """Fed the oracle's answer, each of its tokens is the most likely one, or a tie, and as likely as there."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    scores = llm.generate([[*case.ids, *case.tokens]], params)[0].prompt_logprobs
    assert scores is not None
    for step, token in enumerate(case.tokens):
        position = scores[len(case.ids) + step]
        assert position is not None
        assert position[token].rank == 1 or case.tie(step), f"{case.name}: token {step} has rank {position[token].rank}"
        _assert_near(case, step, position[token].logprob)


def _assert_near(case: Case, step: int, logprob: float) -> None:
    difference = abs(logprob - case.logprobs[step])
    limit = case.tolerance(step) + LOGPROB_ROUNDING
    assert difference <= limit, (
        f"{case.name}: log-probability {step} differs by {difference:.2e}, more than {limit:.2e}"
    )
