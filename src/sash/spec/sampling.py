"""SamplingParams: what a request wants of the sampler. Names follow vLLM so that users can move over."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sash.spec.errors import RequestError

MAX_LOGPROBS = 100


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a request ends.

    Args:
        n: number of answers to the prompt.
        temperature: 0 is greedy; else logits are divided by it.
        top_k: keep the k best tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of best tokens whose probability reaches it, in (0, 1].
        min_p: drop tokens below min_p times the best token's probability, in [0, 1].
        repetition_penalty: above 1 discourages tokens of prompt and answer (CTRL, arXiv 1909.05858).
        presence_penalty: subtracted once from each token of the answer, in [-2, 2].
        frequency_penalty: subtracted per occurrence in the answer, in [-2, 2].
        logit_bias: token id to a number added to its logit.
        allowed_token_ids: only these may be chosen.
        bad_token_ids: these may never be chosen.
        stop: strings that end the answer; they are not part of it.
        stop_token_ids: token ids that end the answer.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: the model's own end tokens do not end the answer.
        min_tokens: no end before so many tokens.
        max_tokens: end after so many; None: as many as the context has room for; 0 only with
            prompt_logprobs (scoring).
        seed: makes the answer repeatable whatever else runs; None draws from the engine's seed.
        logprobs: for each answer token, the log-probabilities of this many best tokens and its own.
        prompt_logprobs: the same for each prompt token but the first.
        skip_special_tokens: leave control tokens out of the text.

    Raises:
        RequestError: a value out of range; the message names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_token_ids: Sequence[int] = ()
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        for name, good, want in self._rules():
            if not good:
                raise RequestError(f"{name} must be {want}, got {getattr(self, name)!r}")

    def _rules(self) -> list[tuple[str, bool, str]]:
        finite = all(math.isfinite(v) for v in (self.temperature, self.repetition_penalty, *self.logit_bias.values()))
        return [
            ("n", self.n >= 1, "at least 1"),
            ("temperature", finite and self.temperature >= 0, "a finite number of 0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", finite and self.repetition_penalty > 0, "above 0"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("logit_bias", finite and all(k >= 0 for k in self.logit_bias), "token ids (0 or more) to finite numbers"),
            (
                "allowed_token_ids",
                self.allowed_token_ids is None or len(self.allowed_token_ids) > 0,
                "None or a non-empty list",
            ),
            ("stop", all(self.stop), "non-empty strings"),
            ("min_tokens", self.min_tokens >= 0, "0 or more"),
            ("max_tokens", self._max_tokens_ok(), "None or at least 1 and min_tokens (0 only with prompt_logprobs)"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"None or 0 to {MAX_LOGPROBS}"),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
                f"None or 0 to {MAX_LOGPROBS}",
            ),
        ]

    def _max_tokens_ok(self) -> bool:
        if self.max_tokens is None:
            return True
        least = 0 if self.prompt_logprobs is not None else 1
        return self.max_tokens >= max(least, self.min_tokens)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token's own with its rank (1: most likely), and the best."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
