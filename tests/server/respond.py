"""A server that answers /v1/responses, and what it said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from tests.server.apps import Json, fake_engine
from tests.server.fake import FakeEngine
from tests.text.fakes import ByteTokenizer

from sash.server.app import create_app
from sash.server.settings import ServerSettings
from sash.server.state import ServerState

PATH = "/v1/responses"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments }}]{% endfor %}</>{% endfor %}"
)


def templated(**options: Any) -> FakeEngine:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = TEMPLATE
    return fake_engine(tokenizer=tokenizer, **options)


def saying(text: bytes, reason: str = "stop", **options: Any) -> FakeEngine:
    return templated(script=lambda message, answer: [*text, reason], **options)


@asynccontextmanager
async def opened(engine: FakeEngine) -> AsyncIterator[tuple[httpx.AsyncClient, ServerState]]:
    app = create_app(engine, ServerSettings(model_name="tiny"))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://sash") as client:
            yield client, app.state.server


def serve(engine: FakeEngine, test: Callable[[httpx.AsyncClient, ServerState], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with opened(engine) as (client, state):
            await test(client, state)

    asyncio.run(whole())


def respond(engine: FakeEngine, **body: Any) -> Json:
    answers: list[Json] = []

    async def test(client: httpx.AsyncClient, _: ServerState) -> None:
        answer = await client.post(PATH, json={"input": "hi"} | body)
        assert answer.status_code == 200, answer.text
        answers.append(answer.json())

    serve(engine, test)
    return answers[0]


def prompt_of(engine: FakeEngine) -> str:
    return bytes(engine.prompts[-1]).decode()


def events_of(text: str) -> list[tuple[str, Json]]:
    out = []
    for block in text.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            out.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return out


def streamed(engine: FakeEngine, **body: Any) -> list[tuple[str, Json]]:
    texts: list[str] = []

    async def test(client: httpx.AsyncClient, _: ServerState) -> None:
        answer = await client.post(PATH, json={"input": "hi", "stream": True} | body)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        texts.append(answer.text)

    serve(engine, test)
    return events_of(texts[0])
