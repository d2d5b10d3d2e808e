"""Tool calls in chat: the shapes of answers and streams, choices, prompts, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pydantic import TypeAdapter
from tests.server.apps import CHAT, Json, chat, fake_engine, post, refusal, saying, stream
from tests.server.tools.test_toolbox import Marked
from tests.text.fakes import ByteTokenizer

from sash.engine.messages import Ready
from sash.server.protocol.chat import ChatChunk, ChatCompletion
from sash.spec.structured import StructuredOutputs

PATH = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Looks out of the window.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
ARGUMENTS = '{"city": "Zürich"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
ID = re.compile(r"call_[0-9a-f]{24}")


DEEP: Json = {}
for _ in range(120):
    DEEP = {"a": DEEP}


def calling(*answers: str, **options: Any) -> Any:
    return saying(*(answer.encode() for answer in answers), **options)


def without_ids(calls: list[Json]) -> list[Json]:
    ids = [call.pop("id") for call in calls]
    assert len(set(ids)) == len(ids) and all(ID.fullmatch(i) for i in ids)
    return calls


def call(name: str, arguments: str) -> Json:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("said", "content", "calls"),
    [
        (CALL, None, [call("weather", ARGUMENTS)]),
        (f"Let me look.\n{CALL}\n{NOW}", "Let me look.", [call("weather", ARGUMENTS), call("now", "{}")]),
        ('<tool_call>{"name": "now"}</tool_call>', None, [call("now", "{}")]),
    ],
)
def test_calls_have_openais_shape(said: str, content: str | None, calls: list[Json]) -> None:
    answer = chat(calling(said), tools=TOOLS)
    TypeAdapter(ChatCompletion).validate_python(answer, strict=True)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert without_ids(choice["message"].pop("tool_calls")) == calls
    assert choice["message"] == {"role": "assistant", "content": content, "refusal": None}
    assert answer["usage"]["completion_tokens"] == len(said.encode())


def test_text_without_calls_is_an_ordinary_answer() -> None:
    for said in ("Hello ", "a <tool_call> without an object", '<tool_call>{"x": 1}</tool_call>'):
        choice = chat(calling(said), tools=TOOLS)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (said, "stop")
        assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("required", [True, False], ids=["required", "auto"])
@pytest.mark.parametrize("end", [5, len(CALL) - 45, len(CALL) - 25, len(CALL) - 8, len(CALL) + 4])
def test_a_call_that_is_cut_off_has_what_was_said_of_it(end: int, required: bool) -> None:
    whole = CALL + NOW
    said, begun = whole[:end], whole[:end].partition('"arguments": ')[2].partition("}")
    expected = [call("weather", "".join(begun[:2]))] if '"weather"' in said else []
    options = {"tools": TOOLS, "tool_choice": "required" if required else "auto"}
    choice = chat(calling(said, reason="length"), **options)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert without_ids(choice["message"].get("tool_calls", [])) == expected and not choice["message"]["content"]
    text, calls, reason = put_together(stream(PATH, calling(said, reason="length"), **options))[0]
    assert (text, without_ids(calls), reason) == ("", expected, "length")


def put_together(chunks: list[Json]) -> dict[int, tuple[str, list[Json], str | None]]:
    """Each choice's text, calls and finish reason, as a client adds up a stream."""
    out: dict[int, tuple[str, list[Json], str | None]] = {}
    for chunk in chunks:
        TypeAdapter(ChatChunk).validate_python(chunk, strict=True)
        for choice in chunk["choices"]:
            text, calls, reason = out.get(choice["index"], ("", [], None))
            assert reason is None
            for part in choice["delta"].get("tool_calls", []):
                if part["index"] == len(calls):
                    assert part["type"] == "function" and part["function"]["name"]
                    calls.append({"id": part["id"], **call(part["function"]["name"], "")})
                else:
                    assert "id" not in part and "name" not in part["function"]
                calls[part["index"]]["function"]["arguments"] += part["function"].get("arguments", "")
            text += choice["delta"].get("content") or ""
            out[choice["index"]] = (text, calls, choice["finish_reason"])
    return out


def test_a_stream_tells_calls_as_they_come() -> None:
    chunks = stream(PATH, calling(f"Look: {CALL}{NOW}"), tools=TOOLS, stream_options={"include_usage": True})
    *parts, usage = chunks
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == len(f"Look: {CALL}{NOW}".encode())
    text, calls, reason = put_together(parts)[0]
    assert (text, reason) == ("Look: ", "tool_calls")
    assert without_ids(calls) == [call("weather", ARGUMENTS), call("now", "{}")]
    pieces = [c for p in parts for c in p["choices"][0]["delta"].get("tool_calls", []) if c["index"] == 0]
    assert len(pieces) > 10, "the arguments came at once"


def test_streams_of_several_answers_keep_them_apart() -> None:
    chunks = stream(PATH, calling(CALL, "No.", '<tool_call>{"name": "now"}</tool_call>'), tools=TOOLS, n=3)
    got = put_together(chunks)
    assert without_ids(got[0][1]) == [call("weather", ARGUMENTS)] and got[0][2] == "tool_calls"
    assert got[1] == ("No.", [], "stop")
    assert without_ids(got[2][1]) == [call("now", "{}")] and got[2][0] == ""


def test_a_stream_with_scores_and_ids_has_each_token_once() -> None:
    options = {"logprobs": True, "return_token_ids": True, "tools": TOOLS}
    chunks = stream(PATH, calling(f"Ok {CALL}"), **options)
    parts = [c["choices"][0] for c in chunks]
    ids = [i for p in parts for i in p.get("token_ids", [])]
    assert bytes(ids).decode() == f"Ok {CALL}"
    assert sum(len(p["logprobs"]["content"]) for p in parts if p["logprobs"]) == len(ids)
    chunks = stream(
        PATH, calling(CALL), tools=TOOLS, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts) and counts[-1] == len(CALL.encode())


def test_a_stream_that_fails_says_so() -> None:
    error = refusal(PATH, CHAT | {"tools": TOOLS, "stream": True}, calling("", reason="error"), 500)
    assert error["code"] == "generation_failed"


def form_of(tokenizer: ByteTokenizer | None = None, **body: Any) -> StructuredOutputs | None:
    engine = calling(CALL, **({"tokenizer": tokenizer} if tokenizer else {}))
    chat(engine, **({"tools": TOOLS} | body))
    return engine.params[-1].structured_outputs


def test_the_choice_decides_what_the_answer_must_be() -> None:
    assert form_of() is None and form_of(tool_choice="auto") is None and form_of(tool_choice="none") is None
    required = form_of(tool_choice="required")
    assert required is not None and "call_1" in required.text and required.origin == "tools"
    named = form_of(tool_choice={"type": "function", "function": {"name": "now"}}, parallel_tool_calls=True)
    assert named is not None and '"now' in json.dumps(named.text) and "weather" not in named.text
    either = form_of(response_format={"type": "json_object"})
    assert either is not None and "start: calls | form" in either.text
    assert form_of(tool_choice="none", response_format={"type": "json_object"}) == StructuredOutputs(json_object=True)


def test_a_choice_of_none_is_no_tools_at_all() -> None:
    engine = calling(CALL)
    answer = chat(engine, tools=TOOLS, tool_choice="none")
    assert answer["choices"][0]["message"]["content"] == CALL
    assert b"weather" not in bytes(engine.prompts[0])


def test_the_prompt_tells_of_tools_and_results() -> None:
    engine = calling("ok", info=Ready(4096, 4, "float32", "none", "pools"))
    messages = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", **call("weather", ARGUMENTS)}]},
        {"role": "tool", "tool_call_id": "c", "content": "Rain."},
    ]
    chat(engine, messages=messages, tools=TOOLS)
    prompt = bytes(engine.prompts[0]).decode()
    assert prompt.startswith("system: You can call functions.") and "Looks out of the window." in prompt
    assert CALL in prompt and "<tool_response>\nRain.\n</tool_response>" in prompt and prompt.endswith("assistant:")
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = (
        "{% for t in tools %}{{ t.function.name }} {% endfor %}{{ messages[1].tool_calls[0].function.arguments.city }}"
    )
    engine = calling("ok", tokenizer=tokenizer)
    chat(engine, messages=messages, tools=TOOLS)
    assert bytes(engine.prompts[0]).decode() == "weather now Zürich"


def test_marks_that_are_control_tokens_are_seen_and_others_left_out() -> None:
    tokenizer = Marked([b"[TOOL_CALLS]", b"</s>"])
    tokenizer.chat_template = "{{ messages[0].content }}[TOOL_CALLS]</s>{{ tools | length }}"
    said = [256, *f'[{{"name": "weather", "arguments": {ARGUMENTS}}}]'.encode(), 257, "stop"]
    engine = fake_engine(tokenizer=tokenizer, script=lambda *_: list(said))
    choice = chat(engine, tools=TOOLS)["choices"][0]
    assert without_ids(choice["message"]["tool_calls"]) == [call("weather", ARGUMENTS)]
    assert choice["message"]["content"] is None and not engine.params[0].skip_special_tokens
    engine = fake_engine(tokenizer=tokenizer, script=lambda *_: [*b"Hi", 257, "stop"])
    assert chat(engine, tools=TOOLS)["choices"][0]["message"]["content"] == "Hi"
    chat(engine)
    assert engine.params[-1].skip_special_tokens


def test_the_servers_option_decides_where_templates_do_not_tell() -> None:
    said = '{"name": "now", "parameters": {}}'
    answer = chat(calling(said), tools=TOOLS)
    assert answer["choices"][0]["message"]["content"] == said
    answer = post(PATH, CHAT | {"tools": TOOLS}, calling(said), tool_call_parser="llama3").json()
    assert without_ids(answer["choices"][0]["message"]["tool_calls"]) == [call("now", "{}")]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]}, "tools.0.function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": DEEP}}]}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [call("f", json.dumps(DEEP))]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [call("f", "[" * 9000)]}]}, "messages.0.tool_calls"),
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": [TOOLS[1]] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"tools": TOOLS, "guided_regex": "a"}, "guided_regex"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}]}, "messages.0.tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_refused_by_name(body: Json, param: str) -> None:
    assert refusal(PATH, CHAT | body)["param"].startswith(param)


def test_a_tool_that_can_not_be_compiled_is_the_tools_fault() -> None:
    engine = fake_engine(refuse="tools grammar can't be used: Unimplemented keys")
    assert refusal(PATH, CHAT | {"tools": TOOLS, "tool_choice": "required"}, engine)["param"] == "tools"
