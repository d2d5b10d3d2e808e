"""/v1/completions: its request, its answer, and the chunks of its stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, Field, WithJsonSchema
from typing_extensions import TypedDict

from sash.server.protocol.common import (
    IDS_SCHEMA,
    WHOLE,
    Count,
    GenerationBody,
    Positive,
    PromptLogprobs,
    Usage,
    whole_ids,
)
from sash.server.protocol.structured import StructuredBody
from sash.spec.sampling import MAX_LOGPROBS

# What we know and can't do, with the reason; everything else that is unknown is ignored, and told.
REFUSED = {
    "suffix": "is not supported: sash continues a text and doesn't fill gaps; leave it out",
    "use_beam_search": "is not supported; sample with n, or leave it out",
    "prompt_embeds": "is not supported; give a prompt",
    "logprob_token_ids": "is not supported; use logprobs",
}


def _prompt(value: object) -> object:
    """A text, texts, token ids, or lists of token ids; checked without a call for each token."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text, a list of texts, a list of token ids or a list of such lists")
    if all(isinstance(item, str) for item in value):
        return value
    if not all(isinstance(item, list) for item in value):
        return whole_ids(value)
    if not all(value):
        raise ValueError("must hold no empty list; give at least one token")
    return [whole_ids(item) for item in value]


_IDS = {**IDS_SCHEMA, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}


class CompletionRequest(GenerationBody, StructuredBody):
    """Texts to go on with."""

    prompt: Annotated[Any, BeforeValidator(_prompt), WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: Count | None = Field(
        None, description="16 when not given; 0 only with echo: the prompt is scored, nothing is added."
    )
    best_of: Positive | None = Field(None, description="Must be n: all answers are returned.")
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    add_special_tokens: bool | None = Field(None, description="Start a text with BOS where the model has one; true.")


class CompletionLogprobs(TypedDict):
    """Scores of the tokens of a text. ``text_offset`` counts characters from the start of the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(TypedDict):
    """One answer, or in a stream its new part. ``stop_reason`` is the stop string or token that ended it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int | None]
    prompt_logprobs: NotRequired[PromptLogprobs | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class Completion(TypedDict):
    """The answer; in a stream a chunk of it, of which only the last has ``usage``, and no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
