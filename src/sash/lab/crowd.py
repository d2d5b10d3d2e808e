"""Several requests in one engine, driven step by step with a look after each."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sash.engine.core import EngineCore
from sash.engine.messages import AddRequest, CancelRequest, Update
from sash.spec.errors import SashError
from sash.spec.sampling import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Job:
    """A request for ``new_tokens`` greedy tokens after ``prompt``; ``logprobs`` asks for the log-probabilities of as
    many best tokens at each."""

    name: str
    prompt: Sequence[int]
    new_tokens: int
    logprobs: int | None = None

    @property
    def rows(self) -> int:
        """Rows that must be computed for it: the last token's is never needed."""
        return len(self.prompt) + self.new_tokens - 1


@dataclass(slots=True)
class Answer:
    """What a job has got so far; ``moments`` are those of its tokens (``time.perf_counter``)."""

    tokens: list[int] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    finished: bool = False


class Crowd:
    """Jobs that run together in a core that is nobody else's."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.answers: dict[str, Answer] = {}

    def add(self, *jobs: Job) -> None:
        """Queue jobs, in this order.

        Raises:
            RequestError: one can never run here.
        """
        for job in jobs:
            params = SamplingParams(max_tokens=job.new_tokens, temperature=0.0, ignore_eos=True, logprobs=job.logprobs)
            self.core.add(AddRequest((job.name,), tuple(job.prompt), params, (0,)))
            self.answers[job.name] = Answer()

    def step(self) -> float:
        """One step; the seconds that it took.

        Raises:
            SashError: a request failed: no figure would mean anything.
        """
        started = time.perf_counter()
        updates = self.core.step()
        now = time.perf_counter()
        for update in updates:
            self._take(update, now)
        return now - started

    def _take(self, update: Update, now: float) -> None:
        answer = self.answers[update.answer_id]
        answer.tokens += update.token_ids
        answer.scores += update.logprobs
        answer.moments += [now] * len(update.token_ids)
        answer.finished = update.finish_reason is not None
        if update.finish_reason not in (None, "length", "cancelled"):
            raise SashError(
                f"a request ended with {update.finish_reason} ({update.error or 'no reason given'}): nothing is "
                "measured; try smaller --lengths"
            )

    def run(self, watch: Callable[[float], None] = lambda seconds: None) -> None:
        """Step until every job has its answer; ``watch`` gets the seconds of each step."""
        while not all(answer.finished for answer in self.answers.values()):
            watch(self.step())

    def stop(self) -> None:
        """End what still runs."""
        for name in self.answers:
            self.core.cancel(CancelRequest(name))
        self.run()


def together(core: EngineCore, jobs: Sequence[Job]) -> dict[str, Answer]:
    """The answers to jobs that are added at once."""
    crowd = Crowd(core)
    crowd.add(*jobs)
    crowd.run()
    return crowd.answers


def difference(a: Answer, b: Answer) -> float:
    """The largest difference of the log-probabilities of two answers' tokens in nats, up to the first token that
    differs."""
    same = itertools.takewhile(lambda pair: pair[0].token_id == pair[1].token_id, zip(a.scores, b.scores, strict=True))
    return max((abs(x.logprob - y.logprob) for x, y in same), default=0.0)
