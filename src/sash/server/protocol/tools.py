"""Tools in chat: what a request describes, and the calls that an answer makes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from sash.server.protocol.common import Body

MAX_DEPTH = 100


def too_deep(value: object) -> bool:
    """Whether lists and mappings stand inside each other more than ``MAX_DEPTH`` times: what walks them recurses."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True


def _shallow(value: object) -> object:
    if too_deep(value):
        raise ValueError(f"must not be nested more than {MAX_DEPTH} times")
    return value


class FunctionSpec(Body):
    """A function that the model may call. ``parameters`` is a JSON schema; left out: it takes none."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Refuse a schema that can't be enforced, where calls are forced.")


class Tool(Body):
    """One tool."""

    type: Literal["function"]
    function: FunctionSpec


class FunctionName(Body):
    """Names a function."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"] = "function"
    function: FunctionName


class ToolBody(Body):
    """Functions that the model may call."""

    tools: Annotated[Annotated[list[Tool], Field(max_length=128)] | None, BeforeValidator(_shallow)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None,
        description="required: at least one call; an object: one call of that function. auto where tools are given.",
    )
    parallel_tool_calls: bool | None = Field(None, description="Several calls in one answer; true.")


class FunctionCall(TypedDict):
    """What is called; ``arguments`` are JSON."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call in an answer."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionDelta(TypedDict):
    """The new part of a call: its name first, then pieces of the arguments."""

    name: NotRequired[str]
    arguments: NotRequired[str]


class ToolCallDelta(TypedDict):
    """The new part of call ``index``."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta
