"""Sequence: one answer in the making, with its tokens; the scheduler only knows their number."""

from __future__ import annotations

from dataclasses import dataclass, field

from sash.engine.drafts import PromptLookup
from sash.engine.grammars import Constraint
from sash.ops.sampling import SamplerState, count_token
from sash.spec.sampling import SamplingParams, TokenLogprobs


@dataclass(slots=True)
class Sequence:
    """Tokens and limits of one answer. ``max_tokens`` bounds the answer; ``prompt_scores`` collects
    the prompt's log-probabilities by position, across chunks and preemptions. ``lookup`` guesses what
    follows, and ``draft`` is its guess for the next step; ``draft_tokens`` were checked so far, of them
    ``accepted_tokens`` were right. ``constraint`` is the answer's place in its grammar."""

    answer_id: str
    tokens: list[int]
    prompt_tokens: int
    max_tokens: int
    params: SamplingParams
    state: SamplerState
    stop_token_ids: frozenset[int]
    deadline_s: float | None
    prompt_scores: list[TokenLogprobs | None] | None
    scheduled_at_s: float | None = None
    lookup: PromptLookup | None = None
    draft: list[int] = field(default_factory=list)
    draft_tokens: int = 0
    accepted_tokens: int = 0
    constraint: Constraint | None = None

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.prompt_tokens

    def wants_scores(self, start: int) -> bool:
        """Whether a row at ``start`` or later still owes a prompt token's log-probability."""
        scores = self.prompt_scores
        return scores is not None and len(scores) < self.prompt_tokens and start < self.prompt_tokens - 1

    def append(self, token: int) -> str | None:
        """Take the next token; returns why the answer ends with it, or None."""
        if self.max_tokens == 0:
            return "length"
        self.tokens.append(token)
        count_token(self.state, token)
        if token in self.stop_token_ids and self.generated > self.params.min_tokens:
            return "stop"
        return "length" if self.generated >= self.max_tokens else None
