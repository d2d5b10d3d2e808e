"""GET /stats, and the stream of it that the page watches."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
from tests.server.apps import fake_engine, serve
from tests.server.fake import FakeEngine

from sash.server.app import create_app
from sash.server.settings import ServerSettings
from sash.server.telemetry.stats import Stats, stats_schema


def test_stats_tell_everything_as_described() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for prompt in ("one", "two"):
            await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4})
        answer = await client.get("/stats")
        assert answer.headers["content-type"] == "application/json"
        stats = msgspec.json.decode(answer.content, type=Stats, strict=True)
        assert (stats.state, stats.model.names, stats.model.max_model_len) == ("ready", ["tiny", "small"], 512)
        assert stats.limits.needs_key is False and stats.limits.max_prompts == 7
        assert stats.requests.finished["length"] == 2 and stats.requests.open == 0
        assert stats.latency.first_token_s.count == 2 and stats.latency.inter_token_s.count == 6
        assert 0 < (stats.latency.first_token_s.p50 or 0) < 5
        assert stats.engine is not None and stats.engine.pools[0].page_map is None
        assert stats.engine.pools[0].slid_pages == 40
        assert stats.throughput.generated_by_second is None and stats.page_maps is None and stats.jobs is None
        assert stats.traffic.statuses == {200: 2}
        assert [process.process for process in stats.machine.processes] == ["server"]
        assert stats.versions["sash"] and stats.versions["torch"]

    serve(test, served_model_names=("small",), max_prompts=7)


def test_stats_hold_no_secrets() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        assert (await client.get("/stats")).status_code == 401
        assert (await client.get("/stats/stream")).status_code == 401
        text = (await client.get("/stats", headers={"authorization": "Bearer hidden-key"})).text
        assert "hidden" not in text and "/etc" not in text

    serve(test, api_keys=("hidden-key",))


def test_a_server_without_its_engine_says_so() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async def state() -> tuple[str, Any]:
            stats = (await client.get("/stats")).json()
            return stats["state"], stats["engine"]

        assert await state() == ("loading", None)
        engine.alive, engine.info = True, info
        assert (await state())[0] == "ready"
        engine.alive = False
        assert await state() == ("dead", None)
        app: Any = client._transport.app  # type: ignore[attr-defined]
        app.state.server.draining = True
        assert (await state())[0] == "draining"

    engine = fake_engine(alive=False)
    engine.info, info = None, engine.info
    serve(test, engine)


def test_the_description_of_stats_is_whole() -> None:
    schema = stats_schema()
    assert "$ref" not in json.dumps(schema)
    assert schema["properties"].keys() == {field.name for field in msgspec.structs.fields(Stats)}


# ------------------------------------------------------------------------- the stream


async def watch(engine: FakeEngine, events: int, *, drain: bool = False) -> list[dict[str, Any]]:
    """The first ``events`` of the stream, or all until it ends; then the client has gone."""
    app = create_app(engine, ServerSettings("tiny"))
    got: list[dict[str, Any]] = []
    enough, sent = asyncio.Event(), False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": b""}
        await enough.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            assert (b"content-type", b"text/event-stream; charset=utf-8") in message["headers"]
        elif message["body"]:
            got.append(json.loads(message["body"].removeprefix(b"data: ")))
            app.state.server.draining = drain and len(got) == events
            if not drain and len(got) == events:
                enough.set()

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/stats/stream",
        "query_string": b"interval_ms=100",
        "headers": [],
    }
    await asyncio.wait_for(app(scope, receive, send), 20)  # type: ignore[arg-type]
    return got


def test_the_stream_tells_pages_and_seconds_and_ends_with_its_client() -> None:
    got = asyncio.run(watch(fake_engine(), 3))
    assert len(got) == 3 and got[2]["time_s"] > got[0]["time_s"]
    assert got[0]["page_maps"]["window"] == {
        "num_pages": 12,
        "cell_pages": 1,
        "owners": ["0.0"],
        "runs": [[0, 3, 7, 1]],
    }
    assert len(got[0]["throughput"]["generated_by_second"]) == 120


def test_the_stream_ends_when_the_server_has_drained() -> None:
    got = asyncio.run(watch(fake_engine(), 2, drain=True))
    assert [one["state"] for one in got] == ["ready", "ready"]
