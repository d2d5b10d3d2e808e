"""/v1/chat/completions: its request, its answer, and the chunks of its stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from sash.server.protocol.common import WHOLE, Body, GenerationBody, Positive, PromptLogprobs, Usage
from sash.server.protocol.structured import StructuredBody
from sash.server.protocol.tools import ToolBody, ToolCall, ToolCallDelta
from sash.spec.sampling import MAX_LOGPROBS

# What we know and can't do, with the reason; everything else that is unknown is ignored, and told.
REFUSED = {
    "use_beam_search": "is not supported; sample with n, or leave it out",
    "echo": "is not supported in chat; the prompt is text of yours already",
    "logprob_token_ids": "is not supported; use top_logprobs",
    "audio": "is not supported; the answer is text",
    "functions": "is not supported; use tools",
    "function_call": "is not supported; use tool_choice",
}


class ChatMessage(Body):
    """One turn of a conversation. ``content`` is a text or a list of parts of type text; what else a message has
    (name, tool_calls …) goes to the template."""

    role: str = Field(min_length=1)
    content: str | list[dict[str, Any]] | None = None


Messages = Annotated[list[ChatMessage], Field(min_length=1)]


class TemplateBody(Body):
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool | None = Field(None, description="End with the start of an answer; true.")
    continue_final_message: bool | None = Field(None, description="Go on inside the last message.")
    add_special_tokens: bool | None = Field(None, description="Start with one BOS where the model has one; true.")
    chat_template: str | None = Field(None, description="Only where the server trusts templates of requests.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="More names for the template.")


class ChatRequest(GenerationBody, TemplateBody, StructuredBody, ToolBody):
    """A conversation to answer."""

    messages: Messages
    max_tokens: Positive | None = Field(None, description="When not given: what the context holds.")
    max_completion_tokens: Positive | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        None, description="Needs logprobs."
    )


class TopLogprob(TypedDict):
    """One of the best tokens at a place; ``bytes`` are its UTF-8, maybe part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer, and the best ones there."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Scores of an answer's tokens."""

    content: list[TokenLogprob]
    refusal: None


class AnswerMessage(TypedDict):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """One answer. ``stop_reason`` is the stop string or token that ended it."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    """The answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs | None]
    prompt_token_ids: NotRequired[list[int]]


class ChatDelta(TypedDict):
    """What is new: first the role, then pieces of text."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    refusal: NotRequired[None]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(TypedDict):
    """The new part of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]


class ChatChunk(TypedDict):
    """A chunk of the stream; the one with ``usage`` comes last and has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]
