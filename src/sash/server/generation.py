"""Prompts under way: one or many, their answers as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from sash.engine.outputs import CompletionOutput, RequestOutput
from sash.server.engine import ServingEngine, Submission
from sash.server.errors import ApiError, as_api_error
from sash.spec.errors import OverloadedError, RequestError
from sash.spec.log import logger
from sash.spec.sampling import SamplingParams

# Seconds between two tries of a prompt that waits for a seat while others have them all.
_RETRY_S = 0.2
# How errors begin that are the request's fault and found only while it runs.
_OWN_FAULTS = ("structured_outputs can't be followed", "no token is left")
Batch = list[tuple[int, list[RequestOutput]]]


class Generation(Protocol):
    """The answers of one HTTP request. Place i belongs to prompt i."""

    def deltas(self) -> AsyncIterator[Batch]:
        """What has come since the last turn, by prompt, to the end of all answers."""

    async def finished(self) -> list[RequestOutput]:
        """All prompts' answers, whole, once they have ended."""


@asynccontextmanager
async def generation(
    engine: ServingEngine, prompts: Sequence[list[int]], params: SamplingParams
) -> AsyncIterator[Generation]:
    """Start prompts; leaving the block cancels what is unfinished.

    Of many prompts as many run or wait as there is room for; the rest follows as these end.

    Raises:
        RequestError, OverloadedError, EngineDeadError: nothing runs.
    """
    if len(prompts) == 1:
        async with engine.submit(prompts[0], params) as submission:
            yield _One(submission)
        return
    many = _Many(engine, prompts, params)
    try:
        await many.start()
        yield many
    finally:
        await many.close()


def check_ending(output: CompletionOutput, *, sent: bool) -> None:
    """Raises ApiError for an answer that has ended in a way that isn't an answer. ``sent``: the client has read a part
    of it, so a time-out is told by its finish_reason."""
    reason = output.finish_reason
    if reason == "error" and output.error and output.error.startswith(_OWN_FAULTS):
        raise as_api_error(RequestError(output.error))
    if reason == "error":
        # What went wrong is for the operator: it may show paths and sizes.
        logger().error("generation_failed", error=output.error)
        raise ApiError(500, "the engine failed on this request; send it again", code="generation_failed")
    if reason == "timeout" and not sent:
        raise ApiError(504, "the request took longer than it may here; ask for less", code="timeout")
    if reason == "cancelled":
        raise ApiError(503, "the request was cancelled by the server; send it again", code="cancelled")


class _One:
    def __init__(self, submission: Submission) -> None:
        self._submission = submission

    async def deltas(self) -> AsyncIterator[Batch]:
        async for deltas in self._submission.deltas():
            yield [(0, deltas)]

    async def finished(self) -> list[RequestOutput]:
        return [await self._submission.finished()]


class _Many:
    """A task for each prompt that runs, and one that starts them in order: two for each seat, so that no seat stands
    empty and the queue has room for others."""

    def __init__(self, engine: ServingEngine, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        self._engine = engine
        self._prompts = prompts
        self._params = params
        self._wholes: list[RequestOutput | None] = [None] * len(prompts)
        self._news: Batch = []
        self._most = max(2 * (engine.info.max_num_seqs if engine.info else 1) // params.n, 1)
        self._running = 0
        self._ended = 0
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._error: Exception | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start as many as there is room for. Raises what the engine says to the first that it refuses."""
        first = min(self._most, len(self._prompts))
        results = await asyncio.gather(*map(self._begin, range(first)), return_exceptions=True)
        late = [i for i, result in enumerate(results) if isinstance(result, OverloadedError)]
        for i, result in enumerate(results):
            if isinstance(result, BaseException) and (i == 0 or i not in late):
                raise result
        late += range(first, len(self._prompts))
        if late:
            self._spawn(self._start_late(late))

    async def _start_late(self, late: list[int]) -> None:
        try:
            for i in late:
                while self._running >= self._most or not await self._tried(i):
                    self._room.clear()
                    if self._running:
                        await self._room.wait()
                    else:
                        await asyncio.sleep(_RETRY_S)
        except Exception as error:  # the reader of the answers is to hear of it
            self._fail(error)

    async def _tried(self, i: int) -> bool:
        try:
            await self._begin(i)
        except OverloadedError:
            return False
        return True

    def _begin(self, i: int) -> asyncio.Future[None]:
        """Resolved once the engine has taken prompt i."""
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._spawn(self._run(i, started))
        return started

    async def _run(self, i: int, started: asyncio.Future[None]) -> None:
        try:
            async with self._engine.submit(self._prompts[i], self._params) as submission:
                self._running += 1
                self._wholes[i] = submission.whole
                started.set_result(None)
                try:
                    async for deltas in submission.deltas():
                        self._news.append((i, deltas))
                        self._changed.set()
                finally:
                    self._running -= 1
            self._ended += 1
        except Exception as error:
            if isinstance(error, RequestError):
                error = RequestError(f"prompt {i}: {error}")
            if started.done():
                self._fail(error)
            else:
                started.set_exception(error)
        self._room.set()
        self._changed.set()

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._changed.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def deltas(self) -> AsyncIterator[Batch]:
        while True:
            if self._news:
                batch, self._news = self._news, []
                yield batch
            elif self._error is not None:
                raise self._error
            elif self._ended == len(self._prompts):
                return
            else:
                self._changed.clear()
                await self._changed.wait()

    async def finished(self) -> list[RequestOutput]:
        async for _ in self.deltas():
            pass
        return [whole for whole in self._wholes if whole is not None]

    async def close(self) -> None:
        """Cancel what still runs, and wait until it has gone."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
