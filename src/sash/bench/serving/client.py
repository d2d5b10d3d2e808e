"""A bare client of streaming answers: events with their times. Nothing but sockets, so that many clients can wait."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sash.spec.errors import SashError

_LINE_BYTES = 1 << 20
_FETCH_S = 30.0


class ClientError(SashError):
    """A server's answer was no success, or broke off."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, in plain HTTP."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """As clients want it."""
        return f"http://{self.host}:{self.port}"


@dataclass(slots=True)
class Answer:
    """A streamed answer: its events without the frame around them, and the seconds after the request of each."""

    events: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


async def stream(
    address: Address, path: str, body: Mapping[str, Any], answer: Answer | None = None, *, limit: int = 1 << 30
) -> Answer:
    """POST ``body`` and take the server-sent events as they come, into ``answer`` where one is given; after ``limit``
    events, or when the task is cancelled, hang up.

    Raises:
        ClientError: no server, a status other than 200, or an answer that breaks off.
    """
    answer = Answer() if answer is None else answer
    reader, writer = await _connect(address)
    try:
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {address.host}:{address.port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        )
        started = time.perf_counter()
        writer.write(head.encode() + data)
        await _head(reader)
        rest = b""
        while len(answer.events) < limit and (data := await _chunk(reader)):
            now = time.perf_counter() - started
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: "):
                    answer.events.append(event[6:].decode())
                    answer.times_s.append(now)
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        raise ClientError(f"{address.url}{path}: the answer broke off ({error or type(error).__name__})") from error
    finally:
        writer.close()
    return answer


async def fetch(address: Address, path: str) -> Any:
    """The JSON at ``path``, None where the body is empty. The server must say the body's length.

    Raises:
        ClientError: no server, no success, no JSON, or nothing for half a minute.
    """
    reader, writer = await _connect(address)
    try:
        head = f"GET {path} HTTP/1.1\r\nHost: {address.host}:{address.port}\r\nConnection: close\r\n\r\n"
        async with asyncio.timeout(_FETCH_S):
            writer.write(head.encode())
            length = await _head(reader)
            return json.loads(await reader.readexactly(length) or b"null")
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        raise ClientError(f"{address.url}{path}: no JSON ({error})") from error
    finally:
        writer.close()


async def _connect(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        return await asyncio.open_connection(address.host, address.port, limit=_LINE_BYTES)
    except OSError as error:
        raise ClientError(f"{address.url} doesn't answer ({error.strerror})") from error


async def _head(reader: asyncio.StreamReader) -> int:
    """Read status and headers of an answer that must be a success; its length where it is told, or 0."""
    head = await reader.readuntil(b"\r\n\r\n")
    status = head.split(b" ", 2)[1]
    found = next((line[15:] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), b"0")
    if status != b"200":
        told = (await reader.readexactly(min(int(found), 2000))).decode(errors="replace")
        raise ClientError(f"status {status.decode()}: {told}")
    return int(found)


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    """The next chunk of a chunked body; empty at its end."""
    size = int(await reader.readuntil(b"\r\n"), 16)
    return (await reader.readexactly(size + 2))[:-2]
