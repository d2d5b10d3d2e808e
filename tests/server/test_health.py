"""Whether the server runs, takes work, and what it serves."""

from __future__ import annotations

import pytest
from tests.server.apps import client_of, fake_engine, serve
from tests.server.fake import FakeEngine

from sash import __version__


def statuses(engine: FakeEngine) -> dict[str, int]:
    out = {}

    async def test(client: object) -> None:
        for path in ("/health", "/ready"):
            answer = await client.get(path)
            out[path] = answer.status_code
            assert (answer.content == b"") == (answer.status_code == 200)

    serve(test, engine)
    return out


@pytest.mark.parametrize(
    ("engine", "health", "ready"),
    [
        (fake_engine(), 200, 200),
        (fake_engine(alive=False, info=None), 200, 503),
        (fake_engine(alive=False), 503, 503),
    ],
    ids=["runs", "loads", "died"],
)
def test_health_is_the_process_and_ready_is_the_engine(engine: FakeEngine, health: int, ready: int) -> None:
    assert statuses(engine) == {"/health": health, "/ready": ready}


def test_models_are_listed_under_all_their_names() -> None:
    async def test(client: object) -> None:
        cards = (await client.get("/v1/models")).json()
        assert cards["object"] == "list" and [card["id"] for card in cards["data"]] == ["org/big", "small"]
        card = (await client.get("/v1/models/org/big")).json()
        assert card == cards["data"][0]
        assert card["owned_by"] == "sash" and card["max_model_len"] == 512 and card["root"] == "org/big"
        missing = await client.get("/v1/models/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert (await client.get("/version")).json() == {"version": __version__}

    serve(test, model_name="org/big", served_model_names=("small", "org/big"))


def test_load_counts_answers_under_way() -> None:
    import asyncio

    async def whole() -> None:
        engine = fake_engine(delay_s=0.05)
        async with client_of(engine) as client:
            work = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "n": 3, "max_tokens": 2}))
            while not engine.num_open:
                await asyncio.sleep(0)
            assert (await client.get("/load")).json() == {"server_load": 3}
            await work
            assert (await client.get("/load")).json() == {"server_load": 0}

    asyncio.run(whole())
