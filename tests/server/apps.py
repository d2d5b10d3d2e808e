"""A server around a scripted engine: no socket, no process, no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import structlog
from structlog.testing import capture_logs
from tests.server.fake import FakeEngine
from tests.text.fakes import ByteTokenizer

from sash.server.app import create_app
from sash.server.settings import ServerSettings
from sash.spec.model import ModelSpec

SPEC = ModelSpec("tiny", 300, 16, (), 512)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
Json = dict[str, Any]


def fake_engine(**options: Any) -> FakeEngine:
    """An engine whose token i is byte i; options are those of ``FakeEngine``."""
    options.setdefault("tokenizer", ByteTokenizer())
    return FakeEngine(SPEC, **options)


def saying(*answers: bytes, reason: str = "stop", **options: Any) -> FakeEngine:
    """An engine that says these bytes, a byte a token; answer i of a prompt takes the i-th, from the start again."""
    return fake_engine(script=lambda _, i: [*answers[i % len(answers)], reason], **options)


@contextmanager
def logged() -> Iterator[list[Json]]:
    """The lines that are logged meanwhile. Afterwards nobody has configured structlog, as before."""
    try:
        with capture_logs() as lines:
            yield lines
    finally:
        structlog.reset_defaults()


@asynccontextmanager
async def client_of(engine: FakeEngine, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app around the engine; settings are those of ``ServerSettings``."""
    defaults = settings.pop("default_sampling", None)
    app = create_app(engine, ServerSettings(**({"model_name": "tiny"} | settings)), defaults)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://sash") as client:
        yield client


def serve(
    test: Callable[[httpx.AsyncClient], Awaitable[None]], engine: FakeEngine | None = None, **settings: Any
) -> None:
    """Run a test against a server of its own."""

    async def whole() -> None:
        async with client_of(engine or fake_engine(), **settings) as client:
            await test(client)

    asyncio.run(whole())


def post(path: str, body: object, engine: FakeEngine | None = None, **settings: Any) -> httpx.Response:
    """One answer of a server of its own."""
    answers: list[httpx.Response] = []

    async def test(client: httpx.AsyncClient) -> None:
        answers.append(await client.post(path, json=body))

    serve(test, engine, **settings)
    return answers[0]


def complete(engine: FakeEngine | None = None, **body: Any) -> Json:
    """A successful completion's body; the prompt is "Hi" unless given."""
    return _whole(post("/v1/completions", {"prompt": "Hi"} | body, engine))


def chat(engine: FakeEngine | None = None, **body: Any) -> Json:
    """A successful chat completion's body; the message is "hi" unless given."""
    return _whole(post("/v1/chat/completions", CHAT | body, engine))


def _whole(answer: httpx.Response) -> Json:
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refusal(path: str, body: object, engine: FakeEngine | None = None, status: int = 400, **settings: Any) -> Json:
    """The error of an answer that must have this status."""
    answer = post(path, body, engine, **settings)
    assert answer.status_code == status, answer.text
    return dict(answer.json()["error"])


def events(text: str) -> list[Json]:
    """The JSON of each event of a stream, which must end with [DONE]."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert blocks[-1] == "data: [DONE]" and text.endswith("\n\n")
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def stream(path: str, engine: FakeEngine | None = None, **body: Any) -> list[Json]:
    """The chunks of a stream."""
    base: Json = CHAT if "chat" in path else {"prompt": "Hi"}
    answer = post(path, base | body | {"stream": True}, engine)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events(answer.text)
