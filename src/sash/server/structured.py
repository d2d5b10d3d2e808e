"""The form that a body wants its answer to have."""

from __future__ import annotations

from typing import Any

from sash.server.errors import ApiError
from sash.server.protocol.structured import JsonSchema, ResponseFormat, StructuredBody
from sash.spec.structured import StructuredOutputs, structured_from

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


def structured_of(body: StructuredBody) -> StructuredOutputs | None:
    """What ``response_format``, ``structured_outputs`` or a ``guided_`` field asks for.

    Raises:
        ApiError: several of them are given, or one is incomplete.
        RequestError: what it holds is no form.
    """
    found: dict[str, StructuredOutputs | None] = {}
    if body.response_format is not None:
        found["response_format"] = _response_format(body.response_format)
    if body.structured_outputs is not None:
        found["structured_outputs"] = structured_from(body.structured_outputs)
    for name in _GUIDED:
        value: Any = getattr(body, name)
        if value is not None:
            found[name] = StructuredOutputs(**{name.removeprefix("guided_"): value}, origin=name)
    given = [name for name, form in found.items() if form is not None]
    if len(given) > 1:
        raise ApiError(400, f"{given[1]}: {given[0]} is given, too; leave out one of them", param=given[1])
    return found[given[0]] if given else None


def schema_form(given: JsonSchema, origin: str) -> StructuredOutputs:
    """A named schema; only a strict one is refused where it can't be enforced. Raises RequestError."""
    return StructuredOutputs(json=given.schema_, lenient=not given.strict, origin=origin)


def _response_format(given: ResponseFormat) -> StructuredOutputs | None:
    if given.type == "json_object":
        return StructuredOutputs(json_object=True, origin="response_format")
    if given.type == "text":
        return None
    if given.json_schema is None:
        told = 'response_format of type json_schema needs json_schema: {"name": …, "schema": …}'
        raise ApiError(400, told, param="response_format")
    return schema_form(given.json_schema, "response_format")
