"""Forms and tool calls through a real core: its grammars hold, its refusals arrive, nobody waits for them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable

import httpx
import pytest
from tests.engine.conftest import OPTIONS, save_tokenizer
from tests.families import build
from tests.server.apps import Json
from tests.server.test_tools import put_together, without_ids

from sash.engine.async_engine import AsyncEngine
from sash.server.app import create_app
from sash.server.settings import ServerSettings
from sash.spec.load import load_spec
from sash.spec.locate import locate
from sash.text.load import load_tokenizer

CHAT = {"messages": [{"role": "user", "content": "hi"}], "temperature": 1.2}
TOOLS = [
    {"type": "function", "function": {"name": "now"}},
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    },
]
Test = Callable[[httpx.AsyncClient], Awaitable[None]]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Test], None]:
    """Runs a test against a server of its own, whose template is short and knows tools."""
    _, folder = build("gemma3", tmp_path_factory.mktemp("tiny"))
    save_tokenizer(folder)
    template = folder / "short.jinja"
    template.write_text("{{ messages[0].content }}{% if tools %}!{% endif %}")
    source = locate(folder)

    def go(test: Test) -> None:
        options = OPTIONS | {"max_model_len": 256, "threads": 1}
        engine = AsyncEngine(str(folder), options, load_spec(source), load_tokenizer(source.path))

        async def whole() -> None:
            app = create_app(engine, ServerSettings("tiny", chat_template=template))
            try:
                await engine.start()
                transport = httpx.ASGITransport(app)
                async with httpx.AsyncClient(transport=transport, base_url="http://sash", timeout=120) as client:
                    await test(client)
                assert (await engine.report()).running == engine.num_open == 0
            finally:
                await engine.close()

        asyncio.run(whole())

    return go


async def chat(client: httpx.AsyncClient, status: int = 200, **body: object) -> Json:
    answer = await client.post("/v1/chat/completions", json=CHAT | body)
    assert answer.status_code == status, answer.text
    return dict(answer.json())


def test_forms_hold_and_what_can_not_be_compiled_is_the_fields_fault(serve: Callable[[Test], None]) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    named = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}

    async def test(client: httpx.AsyncClient) -> None:
        answers = await asyncio.gather(
            chat(client, response_format=named, n=3, seed=1),
            chat(client, guided_regex="[a-c]{4}", max_tokens=50),
            chat(client, structured_outputs={"choice": ["yes", "no"]}),
            client.post("/v1/completions", json={"prompt": ["a", "b"], "guided_choice": ["x", "yy"], "max_tokens": 9}),
            chat(client, max_tokens=30, ignore_eos=True),
        )
        texts = [choice["message"]["content"] for choice in answers[0]["choices"]]
        assert all(json.loads(text) in ({"a": 1}, {"a": 2}) for text in texts)
        assert {choice["finish_reason"] for choice in answers[0]["choices"]} == {"stop"}
        assert re.fullmatch("[a-c]{4}", answers[1]["choices"][0]["message"]["content"])
        assert answers[2]["choices"][0]["message"]["content"] in ("yes", "no")
        assert {choice["text"] for choice in answers[3].json()["choices"]} <= {"x", "yy"}
        assert answers[4]["usage"]["completion_tokens"] == 30
        bad = named | {"json_schema": {"name": "t", "strict": True, "schema": {"type": "array", "uniqueItems": True}}}
        error = (await chat(client, 400, response_format=bad))["error"]
        assert error["param"] == "response_format" and "uniqueItems" in error["message"]
        bad["json_schema"]["strict"] = False
        await chat(client, response_format=bad, max_tokens=5)
        error = (await chat(client, 400, guided_regex="(", stream=True))["error"]
        assert error["param"] == "guided_regex"

    serve(test)


def test_calls_that_are_required_are_made(serve: Callable[[Test], None]) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for seed in range(4):
            body = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
            choice = (await chat(client, **body))["choices"][0]
            (call,) = without_ids(choice["message"]["tool_calls"])
            check(call["function"])
            assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
            text = (await client.post("/v1/chat/completions", json=CHAT | body | {"stream": True})).text
            blocks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
            assert without_ids(put_together(blocks)[0][1]) == [call]
        named = {"type": "function", "function": {"name": "add"}}
        choice = (await chat(client, tools=TOOLS, tool_choice=named))["choices"][0]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["add"]
        several = (await chat(client, tools=TOOLS, tool_choice="required", max_tokens=200))["choices"][0]
        for call in several["message"]["tool_calls"][:-1]:
            check(call["function"])

    serve(test)


def check(function: Json) -> None:
    arguments = json.loads(function["arguments"])
    assert arguments == {} if function["name"] == "now" else 0 <= arguments["a"] <= 99
