"""What users get back. Names follow vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability at a position, its rank there (1: most likely) and its text."""

    logprob: float
    rank: int
    decoded_token: str


# Token id to Logprob, of the best tokens and the one that stands there.
PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One answer.

    ``finish_reason`` is None while it runs, then stop, length, timeout, cancelled or error;
    ``stop_reason`` the stop string or token id that ended it; ``error`` what went wrong.
    ``logprobs`` has one entry per token when asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request in seconds since it was added, how often it was preempted, and how many tokens of
    its answers were guessed (``speculative``) and how many of them were right."""

    queue_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A request's answers, whole or, from ``LLM.stream``, what is new since the delta before.

    ``prompt_logprobs`` has one entry per prompt token, None for the first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def finished(self) -> bool:
        """Whether every answer has ended."""
        return all(o.finish_reason is not None for o in self.outputs)
