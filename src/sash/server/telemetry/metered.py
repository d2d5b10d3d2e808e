"""MeteredEngine: an engine whose requests are observed, whoever starts them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sash.engine.frontend import Prompt
from sash.engine.messages import Ready
from sash.engine.outputs import RequestOutput
from sash.engine.report import EngineReport
from sash.server.engine import ServingEngine, Submission
from sash.server.telemetry.metrics import Metrics, Observation
from sash.spec.errors import EngineDeadError
from sash.spec.sampling import SamplingParams
from sash.text.base import Tokenizer


class MeteredEngine:
    """``engine`` as it is, with every request in ``metrics``."""

    def __init__(self, engine: ServingEngine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's."""
        return self._engine.tokenizer

    @property
    def info(self) -> Ready | None:
        """The engine's."""
        return self._engine.info

    @property
    def alive(self) -> bool:
        """The engine's."""
        return self._engine.alive

    @property
    def pid(self) -> int | None:
        """The engine's."""
        return self._engine.pid

    @property
    def starts(self) -> int:
        """The engine's."""
        return self._engine.starts

    @property
    def num_open(self) -> int:
        """The engine's."""
        return self._engine.num_open

    @asynccontextmanager
    async def submit(self, prompt: Prompt, params: SamplingParams) -> AsyncIterator[Submission]:
        """As the engine's; raises the same."""
        asked_s = self._metrics.clock()
        async with self._engine.submit(prompt, params) as submission:
            seen = self._metrics.on_start(submission.whole, params, asked_s)
            try:
                yield _MeteredSubmission(submission, seen)
            except EngineDeadError:
                seen.on_end("error")
                raise
            finally:
                seen.on_end()

    async def report(self, *, page_maps: bool = False, timeout_s: float = 10.0) -> EngineReport:
        """As the engine's; raises the same."""
        return await self._engine.report(page_maps=page_maps, timeout_s=timeout_s)


class _MeteredSubmission:
    def __init__(self, submission: Submission, seen: Observation) -> None:
        self._submission = submission
        self._seen = seen

    @property
    def whole(self) -> RequestOutput:
        return self._submission.whole

    async def deltas(self) -> AsyncIterator[list[RequestOutput]]:
        async for deltas in self._submission.deltas():
            self._seen.on_deltas(deltas)
            yield deltas

    async def finished(self) -> RequestOutput:
        async for _ in self.deltas():
            pass
        return self.whole
