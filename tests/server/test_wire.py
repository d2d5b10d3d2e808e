"""What isn't HTTP, or only nearly, over a real socket: it is refused or the line is cut, and the server goes on."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from tests.server.apps import fake_engine, logged

from sash.server import bounded
from sash.server.app import create_app
from sash.server.bounded import BoundedHttp
from sash.server.settings import ServerSettings

BODY = json.dumps({"prompt": "Hello", "max_tokens": 3}).encode()
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
JSON = b"Content-Type: application/json\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
GOOD = POST + JSON + LENGTH + b"Connection: close\r\n\r\n" + BODY
# What must not be taken for a request, or for another one than it is.
BAD = {
    "no HTTP at all": b"hello\r\n\r\n",
    "a TLS greeting": bytes.fromhex("16030100a5010000a10303") + bytes(range(120)),
    "nothing but NUL": b"\0" * 500,
    "another version": b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    "an unknown method": b"FETCH /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "a space in a name": POST + JSON + b"Content-Length : 5\r\n\r\n" + BODY,
    "a name without a colon": POST + JSON + b"Content-Length 5\r\n\r\n" + BODY,
    "a NUL in a header": POST + JSON + b"X-Request-Id: a\0b\r\n" + LENGTH + b"\r\n" + BODY,
    "a negative length": POST + JSON + b"Content-Length: -5\r\n\r\n" + BODY,
    "a length that is no number": POST + JSON + b"Content-Length: ten\r\n\r\n" + BODY,
    "two lengths": POST + JSON + LENGTH + b"Content-Length: 3\r\n\r\n" + BODY,
    "a length and chunks": POST + JSON + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n" + BODY,
    "a chunk without a size": POST + JSON + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + BODY,
    "a chunk of 2^64": POST + JSON + b"Transfer-Encoding: chunked\r\n\r\n1ffffffffffffffff\r\n" + BODY,
    "a header of 200 kB": POST + JSON + b"X-Big: " + b"a" * 200_000 + b"\r\n" + LENGTH + b"\r\n" + BODY,
    "a path of 100 kB": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "a path upwards": b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "the same, spelled": b"GET /page/%2e%2e%2f%2e%2e%2fapp.py HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "a whole address": b"GET http://evil/%0d%0aX-Injected:1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
}


@asynccontextmanager
async def served() -> AsyncIterator[int]:
    """A server around a scripted engine; yields its port."""
    app = create_app(fake_engine(), ServerSettings(model_name="tiny", request_timeout_s=5))
    server = uvicorn.Server(
        uvicorn.Config(app, http=BoundedHttp, ws="none", log_config=None, access_log=False, lifespan="off")
    )
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        task = asyncio.create_task(server._serve([sock]))
        try:
            yield sock.getsockname()[1]
        finally:
            server.should_exit = True
            await task


async def say(port: int, data: bytes) -> bytes:
    """All that is answered before the line is cut, or within a second: what is incomplete is waited for."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    heard = b""
    try:
        writer.write(data)
        async with asyncio.timeout(1):
            while part := await reader.read(1 << 16):
                heard += part
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()
    return heard


def statuses(heard: bytes) -> list[int]:
    return [int(part[:3]) for part in heard.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_is_no_request_is_refused_and_the_server_answers_on() -> None:
    async def whole() -> None:
        async with served() as port:
            for name, data in BAD.items():
                found = statuses(await say(port, data))
                assert all(400 <= status < 500 for status in found), (name, found)
                assert statuses(await say(port, GOOD)) == [200], f"no answer after {name}"
            rng = random.Random(1)
            for _ in range(100):  # a good request with some bytes changed
                data = bytearray(GOOD)
                for _ in range(rng.randint(1, 4)):
                    data[rng.randrange(len(data))] = rng.randrange(256)
                found = statuses(await asyncio.wait_for(say(port, bytes(data)), 5))
                assert all(status < 500 for status in found), (bytes(data), found)
            answer = await say(port, GOOD)
            assert statuses(answer) == [200] and b'"text":"!\\"#"' in answer

    with logged() as lines:
        asyncio.run(whole())
    assert [line for line in lines if line["log_level"] == "error"] == []


def test_offers_of_another_protocol_are_ignored() -> None:
    """As curl --http2 and Java's client make them; what the body says stays as it is."""

    async def whole() -> None:
        async with served() as port:
            offer = b"Connection: close, Upgrade, HTTP2-Settings\r\nUPGRADE: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
            body = b'{"prompt": "\\r\\nUpgrade: h2c", "echo": true, "max_tokens": 1}'
            length = b"Content-Length: %d\r\n" % len(body)
            for given in (offer, offer.replace(b"UPGRADE: h2c", b"upgrade:websocket")):
                heard = await say(port, POST + JSON + length + given + b"\r\n" + body)
                assert statuses(heard) == [200] and b"Upgrade: h2c" in heard, heard

    with logged():
        asyncio.run(whole())


def test_nobody_can_write_headers_of_the_answer() -> None:
    async def whole() -> None:
        async with served() as port:
            for given in (b"ok\rX-Injected: 1", b"ok\tX", "é".encode(), b"a" * 500, b"<script>"):
                heard = await say(port, GOOD.replace(b"Host: x\r\n", b"Host: x\r\nX-Request-Id: " + given + b"\r\n"))
                assert b"x-injected" not in heard.lower() and given not in heard
            body = json.dumps({"prompt": "Hello", "max_tokens": 1, "a\r\nX-Injected: 1": 1, "é": 2}).encode()
            length = b"Content-Length: %d\r\n" % len(body)
            heard = await say(port, POST + JSON + length + b"Connection: close\r\n\r\n" + body)
            head = heard.split(b"\r\n\r\n")[0].lower()
            assert statuses(heard) == [200] and b"x-sash-ignored: ..." in head and b"injected" not in head

    with logged():
        asyncio.run(whole())


async def drip(port: int, start: bytes, part: bytes, parts: int, pause_s: float = 0.0) -> tuple[int, bytes]:
    """How many parts were sent before the line was cut, and what was answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = asyncio.create_task(reader.read())
    sent = 0
    try:
        writer.write(start)
        while sent < parts and not answer.done():
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
            sent += 1
        return sent, await asyncio.wait_for(answer, 5)
    except ConnectionError:
        return sent, b""
    finally:
        answer.cancel()
        writer.transport.abort()


@pytest.mark.parametrize("start", [b"GET /", POST + b"X-Big: ", POST])
def test_a_head_without_an_end_is_cut(start: bytes) -> None:
    part = b"X-A: b\r\n" * 1000 if start == POST else b"a" * 10_000

    async def whole() -> None:
        async with served() as port:
            sent, heard = await drip(port, start, part, 2000)
            assert sent < 1000 and statuses(heard) in ([400], [])
            assert statuses(await say(port, GOOD)) == [200]

    with logged():
        asyncio.run(whole())


@pytest.mark.parametrize("start", [b"", POST, GOOD.replace(b"Connection: close\r\n", b"") + POST])
def test_a_head_that_takes_too_long_is_cut(start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "HEAD_S", 0.3)

    async def whole() -> None:
        async with served() as port:
            sent, heard = await drip(port, start, b"", 400, 0.05)
            assert sent < 400 and statuses(heard) in ([], [200])
            assert statuses(await say(port, GOOD)) == [200]

    with logged():
        asyncio.run(whole())


def test_a_long_body_before_the_next_head_is_no_long_head() -> None:
    body = json.dumps({"prompt": "Hello", "max_tokens": 3, "user": "x" * 300_000}).encode()
    first = POST + JSON + b"Content-Length: %d\r\n\r\n" % len(body) + body

    async def whole() -> None:
        async with served() as port:
            assert statuses(await say(port, first + GOOD[:60])) == [200]
            assert statuses(await say(port, first + GOOD)) == [200, 200]

    with logged():
        asyncio.run(whole())
