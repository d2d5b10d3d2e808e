"""Answers of /v1/responses that are kept: conversations, and answers in the background."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from tests.server.apps import Json, refusal
from tests.server.respond import PATH, events_of, prompt_of, respond, saying, serve, templated

from sash.engine.messages import Ready
from sash.server.responses import ResponseStore, Stored
from sash.server.state import ServerState


def test_a_conversation_goes_on() -> None:
    engine = saying(b"yes")

    async def test(client: httpx.AsyncClient, _: ServerState) -> None:
        first = (await client.post(PATH, json={"input": "a", "instructions": "once"})).json()
        body = {"input": "b", "previous_response_id": first["id"], "stream": True}
        second = events_of((await client.post(PATH, json=body)).text)[-1][1]["response"]
        third = (await client.post(PATH, json={"input": "c", "previous_response_id": second["id"]})).json()
        assert prompt_of(engine) == "<user>a</><assistant>yes</><user>b</><assistant>yes</><user>c</>"
        assert third["previous_response_id"] == second["id"]
        assert (await client.get(f"{PATH}/{third['id']}")).json() == third
        items = (await client.get(f"{PATH}/{third['id']}/input_items")).json()
        assert [item["content"][0]["text"] for item in items["data"]] == ["c"] and not items["has_more"]
        deleted = await client.delete(f"{PATH}/{third['id']}")
        assert deleted.json() == {"id": third["id"], "object": "response", "deleted": True}
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            gone = await client.request(method, f"{PATH}/{third['id']}{path}")
            assert gone.status_code == 404 and gone.json()["error"]["code"] == "response_not_found"

    serve(engine, test)


def test_input_items_come_in_pages() -> None:
    async def test(client: httpx.AsyncClient, _: ServerState) -> None:
        given = [{"role": "user", "content": str(i), "id": f"i{i}"} for i in range(5)]
        path = f"{PATH}/{(await client.post(PATH, json={'input': given})).json()['id']}/input_items"
        page = (await client.get(path, params={"limit": 2})).json()
        assert [item["id"] for item in page["data"]] == ["i4", "i3"] and page["has_more"]
        rest = (await client.get(path, params={"order": "asc", "after": "i2"})).json()
        assert [item["id"] for item in rest["data"]] == ["i3", "i4"] and rest["last_id"] == "i4"
        nowhere = await client.get(path, params={"after": "i9"})
        assert nowhere.status_code == 400 and nowhere.json()["error"]["param"] == "after"

    serve(saying(b"yes"), test)


def test_what_is_not_to_be_kept_is_not() -> None:
    async def test(client: httpx.AsyncClient, _: ServerState) -> None:
        answer = (await client.post(PATH, json={"input": "a", "store": False})).json()
        assert answer["store"] is False and (await client.get(f"{PATH}/{answer['id']}")).status_code == 404
        kept = (await client.post(PATH, json={"input": "a"})).json()
        assert (await client.get(f"{PATH}/{kept['id']}?stream=true")).status_code == 400
        assert (await client.post(f"{PATH}/{kept['id']}/cancel")).status_code == 400

    serve(saying(b"yes"), test)


def test_too_long_a_conversation_loses_its_oldest_turns() -> None:
    turns = [{"role": role, "content": f"{i}{role}" * 3} for i in range(6) for role in ("user", "assistant")]
    given = [{"role": "system", "content": "S"}, *turns, {"role": "user", "content": "end"}]

    def sent(longest: int, truncation: str) -> str:
        engine = saying(b"yes")
        engine.info = Ready(longest, 4, "float32", "none", "pools")
        respond(engine, input=given, truncation=truncation, max_output_tokens=10)
        return prompt_of(engine)

    whole = sent(4096, "auto")
    assert whole == sent(4000, "disabled")
    turns_of = whole.removeprefix("<system>S</>").split("<user>")[1:]
    candidates = ["<system>S</><user>" + "<user>".join(turns_of[i:]) for i in range(len(turns_of))]
    for shorter, longer in zip(candidates[1:], candidates, strict=False):
        assert sent(len(longer) + 10, "auto") == longer
        assert sent(len(longer) + 9, "auto") == shorter
    # Where no turn fits with the answer, what fits without is sent; the engine gives it what is left.
    assert sent(len(whole) + 1, "disabled") == whole
    for truncation, told in (("auto", "shorten it"), ("disabled", "truncation: auto")):
        engine = saying(b"yes", info=Ready(len(candidates[-1]), 4, "float32", "none", "pools"))
        error = refusal(PATH, {"input": given, "truncation": truncation}, engine)
        assert error["param"] == "input" and error["code"] == "context_length_exceeded" and told in error["message"]


async def ended(client: httpx.AsyncClient, response_id: str) -> Json:
    async with asyncio.timeout(20):
        while (answer := (await client.get(f"{PATH}/{response_id}")).json())["status"] == "in_progress":
            await asyncio.sleep(0.002)
    return dict(answer)


def test_answers_in_the_background() -> None:
    engine = saying(b"yes", delay_s=0.002)

    async def test(client: httpx.AsyncClient, state: ServerState) -> None:
        begun = (await client.post(PATH, json={"input": "a", "background": True})).json()
        assert begun["status"] == "in_progress" and begun["background"] is True and begun["output"] == []
        unready = await client.post(PATH, json={"input": "b", "previous_response_id": begun["id"]})
        assert unready.status_code == 400 and "in_progress" in unready.json()["error"]["message"]
        done = await ended(client, begun["id"])
        assert done["status"] == "completed" and done["output"][0]["content"][0]["text"] == "yes"
        assert (await client.post(f"{PATH}/{begun['id']}/cancel")).json() == done
        engine.overloaded = True
        assert (await client.post(PATH, json={"input": "a", "background": True})).status_code == 429
        engine.overloaded, engine.die_after = False, 1
        failed = await client.post(PATH, json={"input": "a", "background": True})
        done = await ended(client, failed.json()["id"])
        assert done["status"] == "failed" and "send it again" in done["error"]["message"]

    serve(engine, test)


def test_answers_in_the_background_can_be_stopped() -> None:
    engine = templated(delay_s=0.002)

    async def test(client: httpx.AsyncClient, state: ServerState) -> None:
        body = {"input": "a", "background": True, "max_output_tokens": 400}
        first, second, third = [(await client.post(PATH, json=body)).json()["id"] for _ in range(3)]
        cancelled = (await client.post(f"{PATH}/{first}/cancel")).json()
        assert cancelled["status"] == "cancelled" and (await ended(client, first)) == cancelled
        assert (await client.delete(f"{PATH}/{second}")).status_code == 200
        async with asyncio.timeout(20):
            while engine.num_open != 1:
                await asyncio.sleep(0.001)
        assert (await client.get(f"{PATH}/{second}")).status_code == 404
        assert (await client.get(f"{PATH}/{third}")).json()["status"] == "in_progress"

    serve(engine, test)
    # The end of the server ended the third.
    assert engine.num_open == 0


def stored(response_id: str, size: int = 10, **fields: Any) -> Stored:
    answer: Any = {"id": response_id, "output": [], "text": "x" * size}
    return Stored(answer, [], [], **fields)


def test_the_oldest_answers_give_way() -> None:
    store = ResponseStore(max_stored=3, max_bytes=10_000)
    for name in "abc":
        store.put(stored(name))
    assert store.get("a") is not None
    store.put(stored("d"))
    assert "b" not in store and all(name in store for name in "acd")
    store.put(stored("e", 9_000))
    store.put(stored("f", 2_000))
    assert "e" not in store and "f" in store
    store.put(stored("f", 3_000))
    assert store._num_bytes == sum(kept.num_bytes for kept in store._stored.values())
    store.put(stored("g", 20_000))
    assert store._num_bytes == 0 and not store._stored


def test_what_is_being_made_stays() -> None:
    async def test() -> None:
        task = asyncio.create_task(asyncio.sleep(100))
        store = ResponseStore(max_stored=1)
        store.put(stored("a", task=task))
        store.put(stored("b"))
        assert "a" in store
        await store.close()
        assert task.cancelled()

    asyncio.run(test())
