"""The null server over a socket, read by the bare client."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from sash.bench.serving.client import Address, Answer, ClientError, fetch, stream
from sash.bench.serving.null_server import NullServer, Recording

USAGE = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}


def chunk(text: str, reason: str | None = None) -> str:
    return json.dumps({"model": "tiny", "choices": [{"index": 0, "text": text, "finish_reason": reason}]})


EVENTS = [chunk("a"), chunk("b"), chunk("c", "length"), json.dumps({"choices": [], "usage": USAGE}), "[DONE]"]
RECORDING = Recording.of(Answer(EVENTS, [0.02, 0.03, 0.05, 0.05, 0.05]))
BODY = {"prompt": [1, 2, 3, 4, 5], "max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}}


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[Address]:
    """An app behind a socket."""
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        task = asyncio.create_task(server._serve([sock]))
        try:
            yield Address("127.0.0.1", sock.getsockname()[1])
        finally:
            server.should_exit = True
            await task


def run(test: Callable[[Address], Awaitable[None]], app: Any = None) -> None:
    async def whole() -> None:
        async with served(app or NullServer(RECORDING, pace=0.001)) as address:
            await test(address)

    asyncio.run(whole())


def test_a_recording_is_what_was_heard(tmp_path: Path) -> None:
    assert RECORDING.first_s == 0.02 and RECORDING.gaps_s == pytest.approx((0.01, 0.02))
    assert RECORDING.chunks == (EVENTS[0], EVENTS[1]) and RECORDING.last == EVENTS[2] and RECORDING.usage == EVENTS[3]
    RECORDING.save(tmp_path / "r.json")
    assert Recording.load(tmp_path / "r.json") == RECORDING
    with pytest.raises(ValueError, match="two events"):
        Recording.of(Answer(EVENTS[2:], [0.1, 0.1, 0.1]))


def test_it_replays_as_many_tokens_as_are_asked_for() -> None:
    async def test(address: Address) -> None:
        answer = await stream(address, "/v1/completions", BODY)
        told = [json.loads(event) for event in answer.events[:-1]]
        assert [d["choices"][0]["text"] for d in told[:-1]] == ["a", "b", "a", "b", "a", "c"]
        assert told[-2]["choices"][0]["finish_reason"] == "length" and answer.events[-1] == "[DONE]"
        assert told[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
        assert answer.times_s == sorted(answer.times_s) and answer.times_s[0] >= RECORDING.first_s
        plain = await stream(address, "/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert plain.events == [EVENTS[2], "[DONE]"]

    run(test)


def test_it_says_how_many_streams_are_open_and_what_it_is() -> None:
    async def test(address: Address) -> None:
        assert await fetch(address, "/v1/models") == {
            "object": "list",
            "data": [{"id": "tiny", "object": "model", "owned_by": "nobody"}],
            "open": 0,
        }
        answer = Answer()
        task = asyncio.create_task(stream(address, "/v1/completions", BODY | {"max_tokens": 100_000}, answer))
        while not answer.events:
            await asyncio.sleep(0.01)
        assert (await fetch(address, "/v1/models"))["open"] == 1
        task.cancel()

    run(test, NullServer(RECORDING, pace=0.05))


def test_whoever_has_enough_hangs_up() -> None:
    async def test(address: Address) -> None:
        answer = await stream(address, "/v1/completions", BODY | {"max_tokens": 100_000}, limit=3)
        assert 3 <= len(answer.events) < 1000

    run(test)


async def refusing(scope: Any, receive: Any, send: Any) -> None:
    """Refuses POST, answers GET with what is no JSON."""
    if scope["type"] == "lifespan":
        return
    body = b"no" if scope["method"] == "GET" else b'{"error": "full"}'
    status = 200 if scope["method"] == "GET" else 429
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def test_what_is_no_answer_is_told() -> None:
    async def test(address: Address) -> None:
        with pytest.raises(ClientError, match=r'status 429: {"error": "full"}'):
            await stream(address, "/v1/completions", BODY)
        with pytest.raises(ClientError, match="no JSON"):
            await fetch(address, "/stats")

    run(test, refusing)

    async def nobody() -> None:
        with pytest.raises(ClientError, match="doesn't answer"):
            await fetch(Address("127.0.0.1", 1), "/health")

    asyncio.run(nobody())
