"""StructuredOutputs take exactly one form, in every way it may be given, and refuse the rest by name."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from sash import SamplingParams
from sash.spec.errors import RequestError
from sash.spec.structured import MAX_BYTES, StructuredOutputs

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"const": "é"}}}


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"json": SCHEMA}, "json", json.dumps(SCHEMA, ensure_ascii=False)),
        ({"json": json.dumps(SCHEMA, indent=2)}, "json", json.dumps(SCHEMA, ensure_ascii=False)),
        ({"json": {}}, "json", "{}"),
        ({"json_object": True}, "json_object", ""),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["yes", 'no "é"']}, "choice", '["yes", "no \\"é\\""]'),
        ({"choice": [""]}, "choice", '[""]'),
        ({"grammar": 'start: "x"'}, "grammar", 'start: "x"'),
    ],
)
def test_each_form_has_a_kind_and_a_text(given: dict[str, Any], kind: str, text: str) -> None:
    wanted = StructuredOutputs(**given)
    assert (wanted.kind, wanted.text) == (kind, text)
    assert wanted == SamplingParams(structured_outputs=given).structured_outputs  # type: ignore[arg-type]
    assert hash(wanted) == hash(StructuredOutputs(**given))


def test_parameters_with_it_survive_a_message() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(json=SCHEMA, disable_any_whitespace=True))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert again == params and again.structured_outputs is not None
    assert again.structured_outputs.disable_any_whitespace
    assert list(json.loads(again.structured_outputs.text)["properties"]) == ["b", "a"]


WRONG: list[tuple[object, str]] = [
    ({"regex": "a", "origin": "me"}, "structured_outputs has no field origin; use json"),
    ({}, "exactly one of json, json_object, regex, choice, grammar"),
    ({"json_object": False}, "exactly one"),
    ({"json": {}, "regex": "a"}, "got json and regex"),
    ({"json": {}, "json_object": True}, "got json and json_object"),
    ({"json": "{"}, "structured_outputs json must be a JSON schema"),
    ({"json": "[1]"}, "structured_outputs json must be a JSON schema"),
    ({"json": '"string"'}, "structured_outputs json must be a JSON schema"),
    ({"json": 5}, "structured_outputs json must be a JSON schema"),
    ({"json": {"a": {1, 2}}}, "structured_outputs json must be a JSON schema"),
    ({"json": {"minimum": float("nan")}}, "structured_outputs json must be a JSON schema"),
    ({"json": "[" * 100_000}, "structured_outputs json must be a JSON schema"),
    ({"json_object": 1}, "structured_outputs json_object must be True or False"),
    ({"json_object": "yes"}, "structured_outputs json_object must be True or False"),
    ({"json": {}, "disable_any_whitespace": None, "regex": ""}, "got json and regex"),
    ({"json": {}, "disable_any_whitespace": 1}, "structured_outputs disable_any_whitespace must be True or False"),
    ({"regex": ""}, "structured_outputs regex must be a text that isn't empty"),
    ({"regex": 5}, "structured_outputs regex must be a text that isn't empty"),
    ({"regex": "\ud800"}, "structured_outputs regex must be valid Unicode"),
    ({"regex": "a" * (MAX_BYTES + 1)}, f"has {MAX_BYTES + 1} bytes; at most {MAX_BYTES}"),
    ({"choice": []}, "structured_outputs choice must be a list of texts that isn't empty"),
    ({"choice": "yes"}, "structured_outputs choice must be a list of texts that isn't empty"),
    ({"choice": ["yes", 5]}, "structured_outputs choice must be a list of texts"),
    ({"choice": ["x" * 100] * 3000}, "structured_outputs choice has"),
    ({"grammar": ""}, "structured_outputs grammar must be a text"),
    ({"grammer": "x"}, "structured_outputs has no field grammer; use json,"),
    ("json", "structured_outputs must be StructuredOutputs or a mapping"),
    (5, "structured_outputs must be StructuredOutputs or a mapping"),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_what_can_not_be_is_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as error:
        SamplingParams(structured_outputs=given)
    assert str(error.value).startswith("structured_outputs ") and len(str(error.value)) < 500
