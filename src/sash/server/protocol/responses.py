"""/v1/responses: its request and its answer. The stream's events are described where they are written."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from sash.server.protocol.chat import TokenLogprob
from sash.server.protocol.common import WHOLE, Body, GenerationBody, Positive

# What we know and can't do, with the reason; everything else that is unknown is ignored, and told.
REFUSED = {
    "conversation": "is not supported; use previous_response_id",
    "prompt": "is not supported: there are no stored prompts here; give input and instructions",
    "max_tokens": "is called max_output_tokens here",
    "max_completion_tokens": "is called max_output_tokens here",
    "messages": "is called input here",
    "response_format": "is called text.format here",
    "tools": "is not supported; leave it out",
    "context_management": "is not supported; leave it out",
}
# Fields of the body's base that mean nothing here.
UNUSED = ("n", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "truncate_prompt_tokens")
INCLUDABLE = "message.output_text.logprobs"
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class TextFormat(Body):
    """The form that the answer must have."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """About the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = Field(None, description="Without effect.")


class ResponseRequest(GenerationBody):
    """A conversation to answer: ``input`` goes on from ``previous_response_id`` where that is given."""

    input: str | list[dict[str, Any]] = Field(
        description="A text, or items: messages, function_call and function_call_output."
    )
    instructions: str | None = Field(None, description="A system message before the input; it isn't carried over.")
    max_output_tokens: Positive | None = Field(None, description="Left out: what the context holds.")
    previous_response_id: str | None = None
    store: bool | None = Field(None, description="Keep the answer in memory, so that it can be read and gone on from.")
    background: bool | None = Field(None, description="Answer at once, generate later; the answer is read with GET.")
    text: TextOptions | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    include: list[str] | None = Field(None, description=f"{INCLUDABLE}: scores of the answer's tokens.")
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: the oldest items are left out where all are too many."
    )
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="More names for the template.")
    user: str | None = None


class OutputText(TypedDict):
    """What the model said."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(TypedDict):
    """An item of the answer."""

    id: str
    type: Literal["message"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class InputDetails(TypedDict):
    """Where the input's rows came from."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    """What the output was."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Tokens in and out."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(TypedDict):
    """Why there is no answer."""

    code: str
    message: str


class Incomplete(TypedDict):
    """Why the answer is cut off."""

    reason: str


class ResponseObject(TypedDict):
    """The answer, or how far it is."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    background: bool
    error: ResponseFailure | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None


class InputItems(TypedDict):
    """The items that an answer was made of; not those of the answers before it."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseDeleted(TypedDict):
    """An answer that is no more."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]
