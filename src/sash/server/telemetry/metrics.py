"""Metrics: what the server itself sees of its requests. ``sash.server.telemetry.exposition`` writes it for Prometheus,
``sash.server.telemetry.stats`` for people; ``sash.server.telemetry.metered`` calls it, so that routes needn't.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from sash.engine.outputs import RequestOutput
from sash.server.telemetry.histograms import Clock, Histogram, Rates, Timing
from sash.spec.sampling import SamplingParams

# Buckets of vLLM, so that dashboards can be compared.
_FIRST_TOKEN_S: tuple[float, ...] = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5)
_FIRST_TOKEN_S += (10, 20, 40, 80, 160, 640, 2560)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_COUNTS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
_ANSWERS = (1, 2, 5, 10, 20)

_CLIENT_GONE = 499
FINISH_REASONS = ("stop", "length", "timeout", "cancelled", "error")
# Why a request for tokens was turned away, by the status of the answer.
_REJECTS = {
    400: "invalid",
    401: "unauthorized",
    404: "model_not_found",
    408: "timeout",
    413: "too_large",
    415: "invalid",
    422: "invalid",
    429: "overloaded",
    500: "failed",
    503: "not_ready",
    504: "timeout",
}
REJECT_REASONS = (*dict.fromkeys(_REJECTS.values()), "draining", "other")
# Seconds of history that the page draws.
HISTORY_S = 120


class Metrics:
    """Counters and timings of one server.

    Args:
        clock: seconds, monotonic; the engine's.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.started_s = clock()
        self.first_token = Timing(_FIRST_TOKEN_S, clock)
        self.inter_token = Timing(_TOKEN_S, clock)
        self.per_token = Timing(_TOKEN_S, clock)
        self.whole = Timing(_REQUEST_S, clock)
        self.queue = Timing(_REQUEST_S, clock)
        self.inference = Histogram(_REQUEST_S)
        self.prefill = Histogram(_REQUEST_S)
        self.decode = Histogram(_REQUEST_S)
        self.prompt_tokens = Histogram(_COUNTS)
        self.generated_tokens = Histogram(_COUNTS)
        self.longest_answer = Histogram(_COUNTS)
        self.max_tokens = Histogram(_COUNTS)
        self.answers = Histogram(_ANSWERS)
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.rejected = dict.fromkeys(REJECT_REASONS, 0)
        self.open_requests = 0
        self.generated = Rates(HISTORY_S + 2, clock)
        self.prompts = Rates(HISTORY_S + 2, clock)

    def on_start(self, whole: RequestOutput, params: SamplingParams, asked_s: float) -> Observation:
        """The engine was asked for something at ``asked_s`` and has taken it; ``whole`` will hold everything of it."""
        self.open_requests += 1
        self.answers.observe(params.n)
        self.prompt_tokens.observe(len(whole.prompt_token_ids))
        if params.max_tokens is not None:
            self.max_tokens.observe(params.max_tokens)
        return Observation(self, whole, asked_s)

    def on_status(self, status: int, *, draining: bool) -> None:
        """A request for tokens was answered with this status; 400 and more count as rejects."""
        if status == 503 and draining:
            self.rejected["draining"] += 1
        elif status >= 400 and status != _CLIENT_GONE:
            self.rejected[_REJECTS.get(status, "other")] += 1


class Observation:
    """One request under way, from when the engine was asked; durations count from there."""

    __slots__ = ("_asked_s", "_ended", "_first_s", "_last_s", "_metrics", "_open", "_tokens", "_whole")

    def __init__(self, metrics: Metrics, whole: RequestOutput, asked_s: float) -> None:
        self._metrics = metrics
        self._whole = whole
        self._asked_s = asked_s
        # Of each answer: when its first and its newest token came, and how many there are.
        answers = len(whole.outputs)
        self._first_s = [0.0] * answers
        self._last_s = [0.0] * answers
        self._tokens = [0] * answers
        self._open = answers
        self._ended = False

    def on_deltas(self, deltas: Sequence[RequestOutput]) -> None:
        """Deltas have come; each costs about a microsecond."""
        metrics = self._metrics
        now = metrics.clock()
        for delta in deltas:
            for output in delta.outputs:
                index, count = output.index, len(output.token_ids)
                if count:
                    if self._tokens[index]:
                        metrics.inter_token.observe(now - self._last_s[index], now)
                    else:
                        self._first(index, now)
                    self._last_s[index] = now
                    self._tokens[index] += count
                    metrics.generated.add(count, now)
                if output.finish_reason is not None:
                    self._finish(index, output.finish_reason, now)

    def _first(self, index: int, now: float) -> None:
        self._first_s[index] = now
        if sum(map(bool, self._tokens)):
            return  # the others share its prefill
        metrics, times = self._metrics, self._whole.metrics
        metrics.first_token.observe(now - self._asked_s, now)
        if times.queue_s is not None and times.first_token_s is not None:
            metrics.queue.observe(times.queue_s, now)
            metrics.prefill.observe(max(times.first_token_s - times.queue_s, 0.0))

    def _finish(self, index: int, reason: str, now: float) -> None:
        metrics, count = self._metrics, self._tokens[index]
        metrics.finished[reason if reason in metrics.finished else "error"] += 1
        self._open -= 1
        if count > 1:
            metrics.per_token.observe((now - self._first_s[index]) / (count - 1), now)

    def on_end(self, unfinished: str = "cancelled") -> None:
        """It is over: finished, failed, or nobody listens any more; ``unfinished`` is how answers without an end
        ended."""
        if self._ended:
            return
        self._ended = True
        metrics = self._metrics
        now = metrics.clock()
        metrics.open_requests -= 1
        metrics.finished[unfinished] += self._open
        metrics.generated_tokens.observe(sum(self._tokens))
        metrics.longest_answer.observe(max(self._tokens))
        metrics.whole.observe(now - self._asked_s, now)
        times = self._whole.metrics
        if times.queue_s is not None:
            metrics.inference.observe(max(now - self._asked_s - times.queue_s, 0.0))
        firsts = [first for first, count in zip(self._first_s, self._tokens, strict=True) if count]
        if firsts:
            metrics.decode.observe(max(self._last_s) - min(firsts))
