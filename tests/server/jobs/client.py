"""A server with jobs around a scripted engine, and a client of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from tests.server.apps import fake_engine
from tests.server.fake import FakeEngine

from sash.server.app import create_app
from sash.server.settings import ServerSettings
from sash.server.state import ServerState

Json = dict[str, Any]


class Client:
    """A client of a server with jobs."""

    def __init__(self, http: httpx.AsyncClient, state: ServerState, engine: FakeEngine) -> None:
        self.http = http
        self.state = state
        self.engine = engine

    async def post(self, body: Any, status: int = 202, **options: Any) -> Json:
        options |= {"content": body} if isinstance(body, bytes) else {"json": body}
        answer = await self.http.post("/v1/jobs", **options)
        assert answer.status_code == status, answer.text
        return answer.json()  # type: ignore[no-any-return]

    async def job(self, job_id: str) -> Json:
        answer = await self.http.get(f"/v1/jobs/{job_id}")
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    async def ended(self, job: Json, status: str = "completed") -> Json:
        async with asyncio.timeout(20):
            while (job := await self.job(job["id"]))["status"] in ("queued", "running", "cancelling"):
                await asyncio.sleep(0.002)
        assert job["status"] == status, job
        return job

    async def results(self, job: Json, **query: Any) -> list[Json]:
        answer = await self.http.get(f"/v1/jobs/{job['id']}/results", params=query)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("application/jsonl")
        return [json.loads(line) for line in answer.text.splitlines()]


@asynccontextmanager
async def opened(folder: Path | None, engine: FakeEngine | None = None, **settings: Any) -> AsyncIterator[Client]:
    engine = engine or fake_engine()
    app = create_app(engine, ServerSettings(**({"model_name": "tiny", "jobs_dir": folder} | settings)))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://sash") as http:
            yield Client(http, app.state.server, engine)


def serve(
    folder: Path | None, test: Callable[[Client], Awaitable[None]], engine: FakeEngine | None = None, **settings: Any
) -> None:
    async def whole() -> None:
        async with opened(folder, engine, **settings) as client:
            await test(client)

    asyncio.run(whole())


def completion(prompt: str = "abc", **fields: Any) -> Json:
    return {"endpoint": "/v1/completions", "body": {"model": "tiny", "prompt": prompt, "max_tokens": 3} | fields}
