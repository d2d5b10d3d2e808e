"""What completions and chat share: request fields, usage, and how a body says what it wants of the sampler.

Requests are pydantic models: strict about types, open to unknown fields, which are ignored and told. Answers are
typed dictionaries: described in the OpenAPI document, and written by msgspec without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from typing_extensions import TypedDict

from sash.server.errors import ApiError
from sash.spec.sampling import MAX_ANSWERS, MAX_LOGPROBS

MAX_INT = (1 << 31) - 1
MAX_STOPS = 256
# Words are looked up on the event loop; none of one token is longer.
MAX_WORDS = 1024
MAX_WORD = 256


def _whole(value: object) -> object:
    """JSON knows no integers: 16.0 is one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Of an integer field. It comes after the field's bounds, or the description would not have them.
WHOLE = BeforeValidator(_whole)
Count = Annotated[int, Field(ge=0, le=MAX_INT), WHOLE]
Positive = Annotated[int, Field(ge=1, le=MAX_INT), WHOLE]


def whole_ids(value: object) -> list[int]:
    """Token ids, checked without a call for each. Raises ValueError."""
    if not isinstance(value, list):
        raise ValueError("must be a list of token ids")
    ids: list[Any] = list(map(_whole, value)) if float in set(map(type, value)) else value
    if ids and set(map(type, ids)) != {int}:
        raise ValueError("must hold token ids, which are integers")
    if ids and (min(ids) < 0 or max(ids) > MAX_INT):
        raise ValueError(f"must hold token ids from 0 to {MAX_INT}")
    return ids


_ID_SCHEMA = {"type": "integer", "minimum": 0, "maximum": MAX_INT}
IDS_SCHEMA = {"type": "array", "items": _ID_SCHEMA}
TokenIds = Annotated[Any, BeforeValidator(whole_ids), WithJsonSchema(IDS_SCHEMA)]


def _stops(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops) or len(stops) > MAX_STOPS:
        raise ValueError(f"must be a text or a list of at most {MAX_STOPS} texts, none of them empty")
    return stops


_TEXT_SCHEMA = {"type": "string", "minLength": 1}
_STOP_SCHEMA = {"anyOf": [_TEXT_SCHEMA, {"type": "array", "items": _TEXT_SCHEMA, "maxItems": MAX_STOPS}]}
Stops = Annotated[Any, BeforeValidator(_stops), WithJsonSchema(_STOP_SCHEMA)]


class Body(BaseModel):
    """A request's body: strict about the types of what it knows, open to the rest."""

    model_config = ConfigDict(extra="allow", strict=True)

    def ignored(self, refused: Mapping[str, str]) -> list[str]:
        """Fields that are given and unknown. Raises ApiError for those in ``refused``, with the reason there."""
        given = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        for name, reason in refused.items():
            if given.get(name) not in (None, False, 0, "", [], {}):
                raise ApiError(400, f"{name} {reason}", param=name, code="unsupported_parameter")
        return [name for name in given if name not in refused]


class StreamOptions(Body):
    """What a stream tells beside text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """Fields that completions and chat share. None is the same as not given."""

    model: str | None = Field(None, description="A name of the served model; left out: the one that is served.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS), WHOLE] | None = None
    temperature: float | None = Field(None, ge=0, le=1e30)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT), WHOLE] | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=1e30)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-1e30, le=1e30)]] | None = Field(
        None, description="Token id, as text, to a number added to its logit."
    )
    seed: Annotated[int, WHOLE] | None = None
    stop: Stops | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: TokenIds | None = None
    bad_token_ids: TokenIds | None = None
    bad_words: list[Annotated[str, Field(min_length=1, max_length=MAX_WORD)]] | None = Field(
        None, max_length=MAX_WORDS, description="Words of one token each."
    )
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_INT), WHOLE] | None = Field(
        None, description="Keep only so many tokens of the prompt's end; -1: as many as fit."
    )

    def ignored(self, refused: Mapping[str, str]) -> list[str]:
        """See ``Body``; options of a stream have no effect without one."""
        pointless = ["stream_options"] if self.stream_options is not None and not self.stream else []
        return pointless + super().ignored(refused)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has the usage so far."""
        return (
            self.include_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        )


class PromptTokensDetails(TypedDict):
    """Where the prompt's rows came from."""

    cached_tokens: int


class Usage(TypedDict):
    """Tokens of all prompts and all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(prompt_tokens: int, completion_tokens: int) -> Usage:
    """A ``Usage``."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


class PromptLogprob(TypedDict):
    """One token at a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


# For each prompt token its own score and the best ones by token id; None for the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]
