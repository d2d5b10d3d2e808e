"""AsyncEngine: the core in a process of its own, seen from an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

from sash.engine.frontend import Frontend, Prompt, Request
from sash.engine.messages import (
    Accepted,
    Failed,
    GetReport,
    Message,
    Ready,
    Refused,
    Report,
    Start,
    Stop,
    ToCore,
    Update,
)
from sash.engine.outputs import RequestOutput
from sash.engine.report import EngineReport
from sash.engine.wire import FrameReader, frame
from sash.spec.errors import ConfigError, EngineDeadError, EngineStoppedError, ModelError, OverloadedError, RequestError
from sash.spec.log import logger
from sash.spec.model import ModelSpec
from sash.spec.sampling import SamplingParams
from sash.text.base import Tokenizer

# Texts up to so many characters are tokenized on the loop: a thread would take longer to start.
_SHORT_TEXT = 2000
_STOP_S = 5.0
_RECENT = 32


class Submission:
    """One request under way: deltas as they come, and the whole so far."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._news = asyncio.Event()
        self._dead: EngineDeadError | None = None
        request.wake = self._news.set

    @property
    def whole(self) -> RequestOutput:
        """Everything so far."""
        return self._request.whole

    def die(self, error: EngineDeadError) -> None:
        """The engine is gone: whoever waits hears of it."""
        self._dead = error
        self._news.set()

    async def deltas(self) -> AsyncIterator[list[RequestOutput]]:
        """What has come since the last turn, at least one delta at a time, to the end of all answers.

        Raises:
            EngineDeadError: the core ended before the answers did; EngineStoppedError where it was told to.
        """
        request = self._request
        while request.deltas or not request.whole.finished:
            while not request.deltas:
                if self._dead is not None:
                    # A new one for each who hears of it: errors hold on to the frames that they have passed.
                    raise type(self._dead)(str(self._dead))
                self._news.clear()
                await self._news.wait()
            deltas, request.deltas = request.deltas, []
            yield deltas

    async def finished(self) -> RequestOutput:
        """The whole, once every answer has ended. Raises as ``deltas`` does."""
        async for _ in self.deltas():
            pass
        return self.whole


class AsyncEngine:
    """Requests of one event loop to a core in another process.

    Args:
        model: for the core: a name, folder, file or hub id.
        options: of ``sash.spec.config.EngineConfig``.
        spec: the model's description; its stop tokens end answers.
        tokenizer: None where only token ids go in and out.
        max_waiting: answers that may wait beside the ``max_num_seqs`` that run; more are turned away.
        log_format: of the core's lines on standard error: json or text.
    """

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any],
        spec: ModelSpec,
        tokenizer: Tokenizer | None,
        *,
        max_waiting: int = 256,
        log_format: str = "json",
    ) -> None:
        self.spec = spec
        self.tokenizer = tokenizer
        self._start = Start(model, dict(options))
        self._max_waiting = max_waiting
        self._log_format = log_format
        self._frontend = Frontend(spec, tokenizer, int(options.get("seed", 0)))
        self._submissions: dict[str, Submission] = {}
        self._accepting: dict[str, asyncio.Future[None]] = {}
        self._reports: dict[int, asyncio.Future[EngineReport]] = {}
        self._report_number = 0
        self._durations: deque[float] = deque(maxlen=_RECENT)
        self._link: _Link | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._ended: asyncio.Future[str] | None = None
        self._loaded = False
        self._stopping = False
        self.info: Ready | None = None
        self.starts = 0

    async def start(self) -> Ready:
        """Start the core's process and wait until it has loaded. May be called again after the core has ended.

        Raises:
            ConfigError, ModelError: the core refused its options or the model.
            EngineDeadError: it ended otherwise.
        """
        loop = asyncio.get_running_loop()
        self._loaded = self._stopping = False
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._ready, self._ended = loop.create_future(), loop.create_future()
        with theirs:
            # -P: a folder named sash where we happen to run must not stand in for the package.
            command = (sys.executable, "-P", "-m", "sash.engine.process", str(theirs.fileno()), self._log_format)
            try:
                self._process = await asyncio.create_subprocess_exec(*command, pass_fds=(theirs.fileno(),))
            except OSError as error:
                ours.close()
                self._ended.set_result(str(error))
                raise EngineDeadError(f"no process could be started for the engine: {error}") from error
        self.starts += 1
        link = self._link = _Link(self._take, self._gone)
        await loop.create_connection(lambda: link, sock=ours)
        self._send(self._start)
        self.info = await self._ready
        self._loaded = True
        return self.info

    @property
    def alive(self) -> bool:
        """Whether the core runs and has loaded."""
        return self._loaded and self._ended is not None and not self._ended.done()

    @property
    def pid(self) -> int | None:
        """Of the core's process; None while there is none."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def ended(self) -> str:
        """Wait until the core has ended; returns why."""
        if self._ended is None:
            raise EngineDeadError("the engine was never started")
        return await asyncio.shield(self._ended)

    @property
    def num_open(self) -> int:
        """Answers that are started and unfinished."""
        return self._frontend.num_open

    @asynccontextmanager
    async def submit(self, prompt: Prompt, params: SamplingParams) -> AsyncIterator[Submission]:
        """Start a request; leaving the block cancels what is unfinished of it.

        Raises:
            RequestError: it can never run.
            OverloadedError: too much is waiting already.
            EngineDeadError: the core doesn't run.
        """
        self._check_room(params.n)
        if isinstance(prompt, str) and len(prompt) > _SHORT_TEXT:
            request = await asyncio.to_thread(self._frontend.open, prompt, params)
        else:
            request = self._frontend.open(prompt, params)
        self._check_room(params.n)
        first = request.message.answer_ids[0]
        submission = Submission(request)
        self._submissions[first] = submission
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._accepting[first] = accepted
        self._frontend.started(request)
        try:
            self._send(request.message)
            await accepted
            yield submission
            self._durations.append(time.monotonic() - request.added_at_s)
        finally:
            self._accepting.pop(first, None)
            self._submissions.pop(first, None)
            for message in self._frontend.close(request):
                if self.alive:
                    self._send(message)

    def _check_room(self, answers: int) -> None:
        if self.info is None or not self.alive:
            raise self._dead_error("the engine is not running; try again in a moment")
        room = self.info.max_num_seqs + self._max_waiting - self._frontend.num_open
        if answers > room and self._frontend.num_open:
            raise OverloadedError(
                f"{self._frontend.num_open} answers run or wait and {max(room, 0)} more may; try again later",
                self._retry_after_s(),
            )
        if answers > room:
            raise RequestError(f"n={answers} is more than the {room} answers that may run or wait here; ask for fewer")

    def _retry_after_s(self) -> int:
        """Seconds until a seat is likely free: how long answers took lately, by the seats that there are."""
        seats = self.info.max_num_seqs if self.info else 1
        mean_s = sum(self._durations) / len(self._durations) if self._durations else 1.0
        return min(max(math.ceil(mean_s / seats), 1), 60)

    async def report(self, *, page_maps: bool = False, timeout_s: float = 10.0) -> EngineReport:
        """The core's counters, queues and pools.

        Raises:
            EngineDeadError: the core doesn't run, or hasn't answered in time.
        """
        if not self.alive:
            raise EngineDeadError("the engine is not running")
        self._report_number += 1
        number = self._report_number
        answer: asyncio.Future[EngineReport] = asyncio.get_running_loop().create_future()
        self._reports[number] = answer
        try:
            self._send(GetReport(number, page_maps))
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            raise EngineDeadError(f"the engine has not answered for {timeout_s:g} s") from None
        finally:
            self._reports.pop(number, None)

    async def close(self) -> None:
        """End the core's process, at once where it hasn't loaded; what is open there fails."""
        if self._process is None:
            return
        self._stopping = self.alive
        with contextlib.suppress(EngineDeadError):
            self._send(Stop())
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_S if self._loaded else 0.0)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                self._process.kill()
            await self._process.wait()
        self._lost()
        if self._link is not None:
            self._link.close()
            self._link = None

    def _send(self, message: ToCore) -> None:
        if self._link is None or not self._link.send(message):
            raise self._dead_error("the engine is not running")

    def _dead_error(self, told: str) -> EngineDeadError:
        """For a request that can't go on: ``told``, unless that is because the engine was told to end."""
        if self._stopping:
            return EngineStoppedError("the engine was stopped before the answer was done; send it again")
        return EngineDeadError(told)

    def _take(self, messages: list[Message]) -> None:
        """News from the core."""
        for message in messages:
            if isinstance(message, Update):
                cancel = self._frontend.take(message)
                if cancel is not None:
                    self._send(cancel)
            else:
                self._take_other(message)

    def _take_other(self, message: Message) -> None:
        match message:
            case Accepted(answer_id):
                _resolve(self._accepting.get(answer_id), None)
            case Refused(answer_id, error):
                _reject(self._accepting.get(answer_id), RequestError(error))
            case Report(number, report):
                _resolve(self._reports.get(number), report)
            case Ready():
                _resolve(self._ready, message)
            case Failed(kind, error):
                self._fail(kind, error)
            case _:
                raise TypeError(f"{type(message).__name__} is no message from a core")

    def _fail(self, kind: str, error: str) -> None:
        known = {"ConfigError": ConfigError, "ModelError": ModelError}
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(known.get(kind, EngineDeadError)(error))
        else:
            logger().error("core_failed", kind=kind, error=error)
        self._lost(f"{kind}: {error.strip().splitlines()[-1] if error.strip() else 'no message'}")

    def _gone(self, link: _Link) -> None:
        if link is self._link:  # else it is that of a core before, heard of when another is being started
            self._lost()

    def _lost(self, reason: str = "its process has ended") -> None:
        """The core is gone: everybody who waits for it hears of it, once."""
        if self._ended is None or self._ended.done():
            return
        self._ended.set_result(reason)
        # Why is for the operator: it may show paths and sizes.
        text = "the engine failed; the request is lost, send it again"
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineDeadError(f"the engine ended while it was loading: {reason}"))
        for accepting in self._accepting.values():
            _reject(accepting, self._dead_error(text))
        for asking in self._reports.values():
            _reject(asking, self._dead_error(text))
        for submission in self._submissions.values():
            submission.die(self._dead_error(text))


def _resolve(future: asyncio.Future[Any] | None, value: object) -> None:
    if future is not None and not future.done():
        future.set_result(value)


def _reject(future: asyncio.Future[Any] | None, error: Exception) -> None:
    if future is not None and not future.done():
        future.set_exception(error)


class _Link(asyncio.Protocol):
    """Our end of the socket."""

    def __init__(self, take: Callable[[list[Message]], None], lost: Callable[[_Link], None]) -> None:
        self._take = take
        self._lost = lost
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no common base with asyncio's

    def data_received(self, data: bytes) -> None:
        self._take(self._reader.feed(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost(self)

    def send(self, message: ToCore) -> bool:
        """False when the core has gone."""
        if self._transport is None:
            return False
        self._transport.write(frame([message]))
        return True

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
