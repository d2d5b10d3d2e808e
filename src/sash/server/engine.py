"""What the server needs of an engine; ``sash.engine.async_engine.AsyncEngine`` is one, tests script another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from sash.engine.frontend import Prompt
from sash.engine.messages import Ready
from sash.engine.outputs import RequestOutput
from sash.engine.report import EngineReport
from sash.spec.sampling import SamplingParams
from sash.text.base import Tokenizer


class Submission(Protocol):
    """One request under way, see ``sash.engine.async_engine.Submission``."""

    @property
    def whole(self) -> RequestOutput:
        """Everything so far."""

    def deltas(self) -> AsyncIterator[list[RequestOutput]]:
        """What has come since the last turn, to the end of all answers. Raises EngineDeadError."""

    async def finished(self) -> RequestOutput:
        """The whole, once every answer has ended."""


class ServingEngine(Protocol):
    """An engine in front of which a server can stand."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's; None where only token ids go in and out."""

    @property
    def info(self) -> Ready | None:
        """Sizes of the loaded core; None until it has loaded once."""

    @property
    def alive(self) -> bool:
        """Whether the core runs and has loaded."""

    @property
    def pid(self) -> int | None:
        """Of the core's process; None while there is none."""

    @property
    def starts(self) -> int:
        """How often the core was started."""

    @property
    def num_open(self) -> int:
        """Answers that are started and unfinished."""

    def submit(self, prompt: Prompt, params: SamplingParams) -> AbstractAsyncContextManager[Submission]:
        """Start a request; leaving the block cancels what is unfinished. Raises RequestError, OverloadedError,
        EngineDeadError."""

    async def report(self, *, page_maps: bool = False, timeout_s: float = 10.0) -> EngineReport:
        """Counters, queues and pools. Raises EngineDeadError."""
