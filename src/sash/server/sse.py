"""Server-sent events straight to the ASGI server, and work that ends when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from sash.server.errors import ApiError, as_api_error, error_body
from sash.server.middleware import ClientGoneError, note
from sash.spec.errors import SashError
from sash.spec.log import logger

DONE = b"data: [DONE]\n\n"
_HEARTBEAT = b": still there\n\n"
Events = Callable[[], AsyncGenerator[bytes, None]]


def event(data: object) -> bytes:
    """Something as one event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


@asynccontextmanager
async def until_client_leaves(receive: Receive) -> AsyncIterator[None]:
    """Runs a block that is cancelled at once when the client closes the connection.

    Raises:
        ClientGoneError: it has.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise ClientGoneError from None
        raise
    finally:
        watcher.cancel()


class EventStream(Response):
    """Sends events as they come, each item of ``events`` in one piece.

    The status goes out with the first item, so that what fails before it is an ordinary error; later errors are an
    event followed by [DONE]. Whoever leaves ends the work. While nothing comes a comment is sent every
    ``heartbeat_s`` seconds. A client that reads nothing for ``stall_s`` seconds is given up.

    Args:
        events: starts the work; closed when it ends.
        headers: further headers of the answer.
        heartbeat_s: seconds.
        stall_s: seconds.
    """

    media_type = "text/event-stream"

    def __init__(self, events: Events, headers: Mapping[str, str], *, heartbeat_s: float, stall_s: float) -> None:
        self._events = events
        self._heartbeat_s = heartbeat_s
        self._stall_s = stall_s
        self._started = False
        self._sending = 0
        self._sent = 0
        self._stalled = False
        self.background = None
        self.status_code = 200
        # No body attribute: its length would become a header.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        async with until_client_leaves(receive):
            pulse = asyncio.create_task(self._pulse(send, task))
            try:
                async with aclosing(self._events()) as events:
                    async for data in events:
                        await self._write(send, data)
            except asyncio.CancelledError:
                if self._stalled and task.uncancel() == 0:
                    raise ClientGoneError from None
                raise
            except Exception as error:
                if not self._started or isinstance(error, ClientGoneError):
                    raise
                await self._write(send, self._told(scope, error))
            finally:
                pulse.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, data: bytes) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._sent += 1
        self._sending += 1
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._sending -= 1

    async def _pulse(self, send: Send, task: asyncio.Task[None]) -> None:
        """Every ``heartbeat_s``: a comment if nothing was sent since; an end if a write has stood still too long."""
        stood_s = 0.0
        while stood_s < self._stall_s:
            seen = self._sent
            await asyncio.sleep(self._heartbeat_s)
            if self._sent != seen:
                stood_s = 0.0
            elif self._sending:
                stood_s += self._heartbeat_s
            else:
                try:
                    async with asyncio.timeout(self._stall_s):
                        await self._write(send, _HEARTBEAT)
                except TimeoutError:
                    break
        self._stalled = True
        task.cancel()

    def _told(self, scope: Scope, error: Exception) -> bytes:
        """An error as the last events of a stream that has begun."""
        if isinstance(error, SashError):
            told = as_api_error(error)
        else:
            logger().error("stream_failed", request_id=scope.get("sash.request_id"), exc_info=error)
            told = ApiError(500, "the server failed on this request", code="internal_error")
        note(scope, error=told.code or str(told.status))
        return event(error_body(told)) + DONE
