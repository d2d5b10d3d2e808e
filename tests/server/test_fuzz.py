"""Ten thousand malformed bodies: each is refused as OpenAI's API would, nothing starts, and the server goes on."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.server.apps import fake_engine, logged
from tests.server.malformed import COMPLETION, MAKERS, VALID, Malformed, malformed

from sash.server.app import background, create_app
from sash.server.settings import ServerSettings

LIMIT = 100_000
COUNT = 10_000


async def post(app: Any, request: Malformed) -> tuple[int, bytes]:
    """Straight into the app; a client's layers would take as long as the server."""
    headers = [(b"content-type", request.content_type.encode())] if request.content_type else []
    if request.content_encoding:
        headers.append((b"content-encoding", request.content_encoding.encode()))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 5),
        "server": ("127.0.0.1", 8000),
    }
    messages = [{"type": "http.request", "body": request.body, "more_body": False}]
    status, parts = 0, []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(parts)


def problem(request: Malformed, status: int, body: bytes) -> str | None:
    """What is wrong with an answer to a request that must be refused."""
    if not 400 <= status < 500:
        return f"status {status}"
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return f"no error body: {body[:200]!r}"
    if set(error) != {"message", "type", "param", "code"} or not error["message"] or "Traceback" in error["message"]:
        return f"another error body: {body[:200]!r}"
    return None if len(body) < 4000 else f"{len(body)} bytes of error"


def test_ten_thousand_malformed_bodies_are_refused_and_the_server_answers_on(tmp_path: Path) -> None:
    engine = fake_engine()
    app = create_app(engine, ServerSettings(model_name="tiny", max_body_bytes=LIMIT, jobs_dir=tmp_path))
    wrong: Counter[str] = Counter()
    examples: list[str] = []
    kinds: Counter[str] = Counter()

    async def whole() -> None:
        async with background(app.state.server):
            await go()

    async def go() -> None:
        before = asyncio.all_tasks()
        for request in malformed(COUNT, LIMIT):
            kinds[request.kind] += 1
            status, body = await post(app, request)
            if told := problem(request, status, body):
                wrong[f"{request.kind} {request.path}"] += 1
                examples.append(f"{request.kind} {request.path} {request.body[:300]!r}: {told}")
        assert not wrong, f"{wrong}\n" + "\n".join(examples[:5])
        assert engine.prompts == [] and engine.num_open == 0
        for path, valid in VALID.items():
            status, body = await post(app, Malformed("none", path, json.dumps(valid).encode()))
            assert status in (200, 202), body
        assert engine.prompts[0] == list("Hello é".encode())
        status, body = await post(app, Malformed("none", "/v1/completions", json.dumps(COMPLETION).encode()))
        assert json.loads(body)["choices"][0]["text"] == '!"#$%'
        await asyncio.sleep(0.01)  # cancelled tasks end in their next turn
        assert asyncio.all_tasks() == before

    with logged() as lines:
        asyncio.run(whole())
    assert {line["log_level"] for line in lines} == {"info"}
    assert len(kinds) == len(MAKERS) + 3 and sum(kinds.values()) == COUNT and min(kinds.values()) > COUNT / 20
