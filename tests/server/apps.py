"""A server around a scripted engine: no socket, no process, no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from tests.server.fake import FakeEngine
from tests.text.fakes import ByteTokenizer

from sash.server.app import create_app
from sash.server.settings import ServerSettings
from sash.spec.model import ModelSpec

SPEC = ModelSpec("tiny", 300, 16, (), 512)


def fake_engine(**options: Any) -> FakeEngine:
    """An engine whose token i is byte i; options are those of ``FakeEngine``."""
    options.setdefault("tokenizer", ByteTokenizer())
    return FakeEngine(SPEC, **options)


@asynccontextmanager
async def client_of(engine: FakeEngine, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app around the engine; settings are those of ``ServerSettings``."""
    app = create_app(engine, ServerSettings(**({"model_name": "tiny"} | settings)))
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
