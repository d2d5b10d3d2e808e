"""/v1/responses: shapes, events and OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response as ClientResponse
from pydantic import TypeAdapter
from tests.server.apps import Json, refusal
from tests.server.raw import RawCall
from tests.server.respond import PATH, prompt_of, respond, saying, serve, streamed, templated

from sash.server.protocol.responses import ResponseObject
from sash.server.state import ServerState
from sash.spec.errors import EngineStoppedError
from sash.spec.structured import StructuredOutputs


def test_the_answer_has_openais_shape() -> None:
    engine = saying(b"yes")
    answer = respond(engine, temperature=0.5, metadata={"a": "b"}, max_output_tokens=9)
    TypeAdapter(ResponseObject).validate_python(answer, strict=True)
    ClientResponse.model_validate(answer, strict=True)
    assert answer["id"].startswith("resp_") and answer["object"] == "response" and answer["status"] == "completed"
    (item,) = answer["output"]
    assert item.pop("id").startswith("msg_")
    text = {"type": "output_text", "text": "yes", "annotations": [], "logprobs": []}
    assert item == {"type": "message", "status": "completed", "role": "assistant", "content": [text]}
    assert answer["usage"]["input_tokens"] == len(engine.prompts[0]) and answer["usage"]["output_tokens"] == 3
    assert answer["usage"]["total_tokens"] == len(engine.prompts[0]) + 3
    assert answer["temperature"] == 0.5 and answer["metadata"] == {"a": "b"} and answer["max_output_tokens"] == 9
    assert answer["text"] == {"format": {"type": "text"}} and answer["store"] is True
    assert engine.params[0].max_tokens == 9 and engine.params[0].temperature == 0.5


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    answer = respond(saying(b"ye", reason="length"))
    assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("given", "instructions", "prompt"),
    [
        ("hi", None, "<user>hi</>"),
        ("hi", "be brief", "<system>be brief</><user>hi</>"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], None, "<user>a</><assistant>b</>"),
        (
            [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}],
            None,
            "<user>a\nb</>",
        ),
        ([{"role": "developer", "content": "x"}, {"role": "user", "content": "a"}], "i", "<system>i\n\nx</><user>a</>"),
        (
            [
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "42"},
                {"type": "reasoning", "summary": []},
            ],
            None,
            "<assistant>[f {}][g {}]</><tool>42</>",
        ),
    ],
)
def test_items_become_messages(given: Any, instructions: str | None, prompt: str) -> None:
    engine = saying(b"yes")
    respond(engine, input=given, instructions=instructions)
    assert prompt_of(engine) == prompt


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"input": []}, "input", "input is empty"),
        ({"input": [{"role": "user", "content": "a", "id": 5}]}, "input.0.id", "id must be a text"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input.0.role", "role must be one of user"),
        ({"input": [{"role": "user", "content": 5}]}, "input.0.content", "a text or a list of parts"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0",
            "parts of type 'input_image' are not supported",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input.0.content.0.text",
            "text must be a text",
        ),
        ({"input": [{"role": "user", "content": "a"}, {"type": "item_reference", "id": "x"}]}, "input.1.type", "items"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id", "call_id must be a text"),
        ({"input": 5}, "input", "input"),
        ({}, "input", "Field required"),
        ({"input": "a", "n": 2}, "n", "not supported"),
        ({"input": "a", "max_tokens": 2}, "max_tokens", "max_output_tokens"),
        ({"input": "a", "tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice", "not supported"),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}},
            "text.format.schema",
            "needs a schema",
        ),
        ({"input": "a", "text": {"format": {"type": "grammar"}}}, "text.format.type", "Input should be"),
        ({"input": "a", "background": True, "stream": True}, "background", "exclude"),
        ({"input": "a", "background": True, "store": False}, "background", "needs store"),
        ({"input": "a", "previous_response_id": "resp_x"}, "previous_response_id", "not here"),
        ({"input": "a", "conversation": "c"}, "conversation", "use previous_response_id"),
    ],
)
def test_what_cant_be_done_is_named(body: Json, param: str, told: str) -> None:
    error = refusal(PATH, body)
    assert error["param"] == param and told in error["message"], error


def test_fields_of_defaults_are_taken_and_unknown_ones_told() -> None:
    async def test(client: httpx.AsyncClient, _: ServerState) -> None:
        body = {
            **{"input": "a", "n": 1, "tools": [], "tool_choice": "auto", "text": {"format": {"type": "text"}}},
            **{"reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"], "service_tier": "auto"},
        }
        answer = await client.post(PATH, json=body)
        assert answer.status_code == 200, answer.text
        assert sorted(answer.headers["x-sash-ignored"].split(", ")) == ["include", "reasoning", "service_tier"]

    serve(saying(b"yes"), test)


def test_the_form_of_the_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    given = {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}
    engine = saying(b"{}")
    answer = respond(engine, text={"format": given})
    form = engine.params[0].structured_outputs
    assert form is not None and form.json is not None and json.loads(form.text) == schema
    assert answer["text"] == {"format": given}
    engine = saying(b"{}")
    respond(engine, text={"format": {"type": "json_object"}})
    assert engine.params[0].structured_outputs == StructuredOutputs(json_object=True)
    for strict in (True, False, None):
        engine = saying(b"{}")
        respond(engine, text={"format": given | {"strict": strict}})
        assert engine.params[0].structured_outputs == StructuredOutputs(json=schema, lenient=not strict)
    engine.refuse = "text.format json can't be used: Unimplemented keys"
    assert refusal(PATH, {"input": "a", "text": {"format": given}}, engine)["param"] == "text.format"


def test_events_come_in_order_and_are_numbered() -> None:
    events = streamed(saying("hé!".encode()))
    names = [name for name, _ in events]
    deltas = names.count("response.output_text.delta")
    assert deltas >= 1
    assert names == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        *["response.output_text.delta"] * deltas,
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        "response.completed",
    ]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(name == data["type"] for name, data in events)
    assert "".join(data["delta"] for name, data in events if name.endswith("text.delta")) == "hé!"
    created, last = events[0][1]["response"], events[-1][1]["response"]
    assert created["status"] == "in_progress" and created["output"] == [] and created["usage"] is None
    assert last["output"][0]["content"][0]["text"] == "hé!" and created["id"] == last["id"]
    TypeAdapter(ResponseObject).validate_python(last, strict=True)
    assert {data["item_id"] for _, data in events if "item_id" in data} == {last["output"][0]["id"]}


def test_a_stream_that_is_cut_off_ends_incomplete() -> None:
    assert streamed(saying(b"ye", reason="length"))[-1][0] == "response.incomplete"


@pytest.mark.parametrize(("reason", "told"), [("error", "the engine failed on this request"), ("timeout", "longer")])
def test_a_stream_that_fails_says_so(reason: str, told: str) -> None:
    name, data = streamed(saying(b"ye", reason=reason))[-1]
    assert name == "response.failed" and data["response"]["status"] == "failed"
    assert data["response"]["error"]["code"] == "server_error" and told in data["response"]["error"]["message"]


def test_an_engine_that_dies_ends_the_stream_with_a_failure() -> None:
    engine = saying(b"yes")
    engine.die_after = 1
    name, data = streamed(engine)[-1]
    assert name == "response.failed" and "send it again" in data["response"]["error"]["message"]
    engine.dies_of = EngineStoppedError("stopped")
    name, data = streamed(engine)[-1]
    assert name == "response.failed" and "server shut down" in data["response"]["error"]["message"]


def test_what_fails_before_the_stream_is_an_ordinary_error() -> None:
    engine = templated()
    engine.overloaded = True
    assert refusal(PATH, {"input": "a", "stream": True}, engine, status=429)["code"] == "overloaded"


def test_a_client_that_leaves_ends_its_stream() -> None:
    async def test() -> None:
        engine = templated(delay_s=0.001)
        call = RawCall(engine, PATH, {"input": "a", "stream": True, "max_output_tokens": 400})
        await call.until("output_text.delta")
        call.leave()
        await call.end()
        assert engine.num_open == 0 and len(engine.cancelled) == 1

    asyncio.run(test())


def test_scores_of_tokens() -> None:
    body: Json = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    logprobs = respond(saying(b"ab"), **body)["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs] == ["a", "b"] and len(logprobs[0]["top_logprobs"]) == 2
    events = streamed(saying(b"ab"), **body)
    told = [entry for name, data in events if name.endswith("text.delta") for entry in data["logprobs"]]
    assert told == logprobs == events[-1][1]["response"]["output"][0]["content"][0]["logprobs"]


def test_openais_own_client() -> None:
    async def test(client: httpx.AsyncClient, _: ServerState) -> None:
        api = openai.AsyncOpenAI(api_key="k", base_url="http://sash/v1", http_client=client, max_retries=0)
        answer = await api.responses.create(model="tiny", input="hi", instructions="be brief")
        assert answer.output_text == "yes" and answer.status == "completed" and answer.usage is not None
        texts = []
        async with api.responses.stream(model="tiny", input="hi", previous_response_id=answer.id) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    texts.append(event.delta)
                    assert event.snapshot == "".join(texts)
            final = await stream.get_final_response()
        assert "".join(texts) == final.output_text == "yes" and final.previous_response_id == answer.id
        kinds = [event.type async for event in await api.responses.create(model="tiny", input="hi", stream=True)]
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert (await api.responses.retrieve(answer.id)).output_text == "yes"
        items = [item async for item in api.responses.input_items.list(answer.id)]
        assert len(items) == 1
        await api.responses.delete(answer.id)
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(answer.id)
        later = await api.responses.create(model="tiny", input="hi", background=True)
        assert (await api.responses.cancel(later.id)).status in ("cancelled", "completed")
        with pytest.raises(openai.BadRequestError, match="input is empty"):
            await api.responses.create(model="tiny", input=[])

    serve(saying(b"yes"), test)
