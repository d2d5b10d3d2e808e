"""Request fields that say which form the answer must have: OpenAI's, vLLM's, and vLLM's older ones."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from sash.server.protocol.common import Body


class JsonSchema(Body):
    """A JSON schema with a name."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="Refuse keywords that can't be enforced; else they are ignored.")


class ResponseFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredBody(Body):
    """The form that the answer must have, in one of these fields. The prompt isn't changed for it: tell the model."""

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of json, json_object, regex, choice, grammar; and disable_any_whitespace."
    )
    guided_json: str | dict[str, Any] | None = Field(None, description="A JSON schema, or JSON of one.")
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = Field(None, description="A grammar in Lark's form or as GBNF.")
