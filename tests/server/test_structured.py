"""The form of an answer, in every field that may ask for it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.server.apps import CHAT, chat, complete, fake_engine, post, refusal, saying, stream

from sash.spec.structured import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
COMPACT = {"json_object": True, "disable_any_whitespace": True}
PATHS = ["/v1/completions", "/v1/chat/completions"]
BODIES = {"/v1/completions": {"prompt": "Hi"}, "/v1/chat/completions": CHAT}


def form_of(path: str, **body: Any) -> StructuredOutputs | None:
    engine = saying(b"a")
    answer = post(path, BODIES[path] | body, engine)
    assert answer.status_code == 200, answer.text
    assert "x-sash-ignored" not in answer.headers
    return engine.params[-1].structured_outputs


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({}, None),
        ({"response_format": None, "structured_outputs": None, "guided_json": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": NAMED}, {"json": SCHEMA, "lenient": True}),
        ({"response_format": {"type": "text"}, "guided_regex": "a+"}, {"regex": "a+"}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": COMPACT}, COMPACT),
        ({"structured_outputs": {"choice": ["a", "b"], "regex": None}}, {"choice": ["a", "b"]}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": '{"type": "string"}'}, {"json": {"type": "string"}}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": 'root ::= "x"'}, {"grammar": 'root ::= "x"'}),
    ],
)  # fmt: skip
def test_every_field_arrives(path: str, body: dict[str, Any], form: dict[str, Any] | None) -> None:
    assert form_of(path, **body) == (None if form is None else StructuredOutputs(**form))


def test_a_strict_schema_is_not_lenient() -> None:
    strict = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    form = form_of(PATHS[1], response_format=strict)
    assert form is not None and not form.lenient and form.origin == "response_format"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": NAMED | {"json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
        ({"response_format": NAMED | {"json_schema": {"schema": [1]}}}, "response_format.json_schema.schema"),
        ({"response_format": "json"}, "response_format"),
        ({"guided_json": '{"a":' * 5000 + "1" + "}" * 5000}, "guided_json"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "origin": 5}}, "structured_outputs"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [5]}, "guided_choice.0"),
        ({"response_format": NAMED, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a"}, "guided_choice": ["a"]}, "guided_choice"),
    ],
)  # fmt: skip
def test_what_is_no_form_is_refused_by_its_field(path: str, body: dict[str, Any], param: str) -> None:
    engine = fake_engine()
    assert refusal(path, BODIES[path] | body, engine)["param"] == param
    assert not engine.params


def test_what_can_not_be_compiled_is_the_fields_fault() -> None:
    engine = fake_engine(refuse="response_format json can't be used: Unimplemented keys")
    error = refusal(PATHS[1], CHAT | {"response_format": NAMED}, engine)
    assert error["param"] == "response_format" and "Unimplemented keys" in error["message"]


@pytest.mark.parametrize(
    ("told", "status"),
    [
        ("error: structured_outputs can't be followed any further: no text can fit it", 400),
        ("error: no token is left: logit_bias bans all that structured_outputs allow", 400),
        ("error: /models/secret exploded", 500),
    ],
)
def test_a_form_that_fails_later_is_told_and_other_failures_are_not(told: str, status: int) -> None:
    error = refusal(PATHS[0], {"prompt": "Hi"}, saying(b"a", reason=told), status)
    assert ("structured_outputs" in error["message"]) == (status == 400) and "secret" not in error["message"]


def test_answers_and_streams_are_as_ever() -> None:
    assert complete(saying(b"[1]"), guided_regex=".*")["choices"][0]["text"] == "[1]"
    assert chat(saying(b"[1]"), response_format=NAMED)["choices"][0]["message"]["content"] == "[1]"
    chunks = stream(PATHS[1], saying(b"[1]"), response_format=NAMED)
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == "[1]"
