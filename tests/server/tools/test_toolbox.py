"""What a request's tools make of its prompt and of its answer's form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer
from tests.text.fakes import ByteTokenizer

from sash.engine.grammar_process import compiled
from sash.server.errors import ApiError
from sash.server.protocol.tools import ToolBody
from sash.server.tools.formats import FORMATS, GEMMA, HERMES, LLAMA3, MISTRAL, control_texts, format_of
from sash.server.tools.prompt import with_tools
from sash.server.tools.toolbox import Toolbox, toolbox_of
from sash.spec.structured import StructuredOutputs
from sash.text.chat import render_chat

PAIR = {"$ref": "#/$defs/pair", "$defs": {"pair": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": 'Adds "two" ::= {}', "parameters": PAIR}},
    {"type": "function", "function": {"name": "get.time"}},
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "3"}]},
    {"role": "user", "content": "Thanks."},
]


def toolbox(form: str = "hermes", tokenizer: Any = None, template: str = "", **body: Any) -> Toolbox:
    found = toolbox_of(ToolBody(**({"tools": TOOLS} | body)), FORMATS[form], template, tokenizer)
    assert found is not None
    return found


def accepts(form: StructuredOutputs | None, text: str | bytes) -> bool:
    assert form is not None
    matcher = compiled(LLTokenizer("byte"), form)
    data = text if isinstance(text, bytes) else text.encode()
    return bool(matcher.consume_tokens(list(data)) and matcher.is_accepting())


@pytest.mark.parametrize("name", FORMATS)
def test_required_calls_are_those_that_the_format_writes(name: str) -> None:
    form, box = FORMATS[name], toolbox(name, tool_choice="required")
    grammar = box.constraint(None)
    one, none = ("add", '{"a": 5}'), ("get.time", "{}")
    for calls in ([one], [none], [one, none, one], [none] * 8):
        assert accepts(grammar, form.write(calls))
    wrong = [[("add", '{"a": "5"}')], [("get.time", '{"zone": 1}')], [("other", "{}")], [none] * 9, []]
    assert not any(accepts(grammar, form.write(calls)) for calls in wrong)
    assert not accepts(grammar, "Some text")
    single = toolbox(name, tool_choice="required", parallel_tool_calls=False).constraint(None)
    assert accepts(single, form.write([one])) and not accepts(single, form.write([one, one]))
    named = toolbox(name, tool_choice={"type": "function", "function": {"name": "add"}})
    assert [tool.function.name for tool in named.tools] == ["add"]
    assert accepts(named.constraint(None), form.write([one]))
    assert not any(accepts(named.constraint(None), form.write(calls)) for calls in ([none], [one, one]))


def test_without_a_duty_the_form_is_the_bodys_or_calls() -> None:
    box = toolbox(tool_choice="auto")
    assert box.constraint(None) is None
    form = StructuredOutputs(json={"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}, origin="response_format")
    either = box.constraint(form)
    assert accepts(either, "5") and accepts(either, HERMES.write([("get.time", "{}")]))
    assert not accepts(either, "five")
    assert accepts(box.constraint(StructuredOutputs(json_object=True)), '{"a": 1}')
    with pytest.raises(ApiError, match="response_format can't stand beside tools") as error:
        box.constraint(StructuredOutputs(regex="a", origin="response_format"))
    assert error.value.param == "response_format"


def test_a_strict_tool_must_be_enforceable_and_others_are_as_far_as_they_are() -> None:
    def grammar(strict: bool) -> StructuredOutputs | None:
        parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}
        return toolbox(tools=[tool], tool_choice="required").constraint(None)

    assert accepts(grammar(False), HERMES.write([("f", '{"a": []}')]))
    with pytest.raises(ValueError, match="uniqueItems"):
        accepts(grammar(True), "")


def test_marks_that_are_control_tokens_are_tokens_of_the_grammar() -> None:
    tokenizer = Marked([b"[TOOL_CALLS]", b"</s>", b"<unused>"])
    assert control_texts(MISTRAL, tokenizer) == {"[TOOL_CALLS]": 256} and control_texts(HERMES, tokenizer) == {}
    box = toolbox("mistral", tokenizer, template="{{ x }}</s>", tool_choice="required")
    assert (box.controls, box.dropped) == ({"[TOOL_CALLS]": 256}, ("</s>",))
    form = box.constraint(None)
    assert form is not None and form.text.startswith('start: <[256]> "[" call')
    assert toolbox("hermes", tokenizer).dropped == ()


class Marked(ByteTokenizer):
    """Tokens from 256 on are control tokens, found by ``parse_special``."""

    def __init__(self, extra: list[bytes]) -> None:
        super().__init__(extra, range(256, 256 + len(extra)))

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        known = {self.token_bytes(i).decode(): i for i in self.special_ids}
        return [known[text]] if parse_special and text in known else super().encode(text)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
    ],
)
def test_a_choice_that_can_not_be_is_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        toolbox_of(ToolBody(**({"tools": TOOLS} | body)), HERMES, "", None)
    assert (error.value.status, error.value.param) == (400, param)


def test_no_tools_and_none_of_them_are_the_same() -> None:
    for body in ({"tools": []}, {"tools": None, "tool_choice": "auto"}, {"tool_choice": "none"}):
        assert toolbox_of(ToolBody(**({"tools": TOOLS} | body)), HERMES, "", None) is None


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", MISTRAL),
        ("<|start_header_id|>{% if tools %}Environment: ipython", LLAMA3),
        ("<|im_start|>{% if tools %}<tool_call>", HERMES),
        ("<start_of_turn>{{ role }}", GEMMA),
        ("{{ messages }}", HERMES),
    ],
)
def test_a_template_tells_how_its_model_writes_calls(template: str, form: Any) -> None:
    assert format_of(template) is form
    assert format_of(template, "llama3") is LLAMA3


# ---------------------------------------------------------------------------------- prompts


def rendered(template: str, messages: list[dict[str, Any]], box: Toolbox | None) -> str:
    told, variables = with_tools(messages, template, HERMES, box)
    return render_chat(ByteTokenizer(), told, template=template, **variables)


def test_a_template_that_knows_tools_gets_them_with_arguments_as_objects() -> None:
    template = (
        "{{ tools | tojson }}{% for m in messages %}|{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    text = rendered(template, TALK, toolbox())
    tools, _, talk = text.partition("|")
    assert json.loads(tools) == TOOLS
    assert talk == 'user:Add.|assistant:{"a": 1}{"a": 1}|tool:2|tool:3|user:Thanks.'
    assert rendered("{% if tools %}T{% endif %}{{ messages[0].content }}", TALK, None) == "Add."


PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


def test_other_templates_get_a_plain_form() -> None:
    text = rendered(PLAIN, TALK, toolbox())
    system, user, assistant, result, thanks = text.strip().split("\n[")
    assert system.startswith("[system] You can call functions.")
    lines = [json.loads(line) for line in system.splitlines() if line.startswith('{"name"') and "NAME" not in line]
    assert lines == [tool["function"] for tool in TOOLS]
    assert '<tool_call>\n{"name": "NAME", "arguments": {…}}\n</tool_call>' in system
    assert user == "user] Add."
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert assistant == f"assistant] {call}\n{call}"
    assert result == "user] <tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>"
    assert thanks == "user] Thanks."


def test_the_plain_form_joins_a_system_message_and_text_beside_calls() -> None:
    talk = [{"role": "system", "content": "Be kind."}, {"role": "assistant", "content": "So:", "tool_calls": [CALL]}]
    text = rendered(PLAIN, talk, toolbox())
    assert text.count("[system]") == 1 and "\n\nBe kind.\n" in text
    assert "[assistant] So:\n<tool_call>" in text
    unable = PLAIN + "{# raise_exception('System role not supported') #}"
    text = rendered(unable, [{"role": "user", "content": "Hi"}], toolbox())
    assert text.startswith("[user] You can call functions.") and text.endswith("\n\nHi\n")
    assert rendered(PLAIN, [{"role": "user", "content": "Hi", "tool_calls": None}], None) == "[user] Hi\n"


@pytest.mark.parametrize(
    "calls",
    [
        "x",
        [5],
        [{"function": 5}],
        [{"function": {"arguments": "{}"}}],
        [{"function": {"name": "f", "arguments": "{"}}],
    ],
)
def test_calls_that_are_none_are_refused(calls: Any) -> None:
    with pytest.raises(ApiError, match=r"messages\.0\.tool_calls") as error:
        rendered(PLAIN, [{"role": "assistant", "content": "", "tool_calls": calls}], None)
    assert (error.value.status, error.value.param) == (400, "messages.0.tool_calls")


def test_what_tools_say_is_no_format_string() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "{0} {tools} {example}"}}
    assert "{0} {tools} {example}" in rendered(PLAIN, TALK[:1], toolbox(tools=[tool]))
