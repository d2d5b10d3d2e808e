"""/tokenize and /detokenize; their shapes are vLLM's."""

from __future__ import annotations

from typing_extensions import TypedDict

from sash.server.protocol.chat import Messages, TemplateBody
from sash.server.protocol.common import Body, TokenIds


class TokenizeRequest(TemplateBody):
    """A text (``prompt``) or a conversation (``messages``); the fields of templates belong to the latter."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    return_token_strs: bool | None = None


class Tokens(TypedDict):
    """Token ids, and their texts where these were asked for."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(Body):
    """Token ids."""

    model: str | None = None
    tokens: TokenIds


class Detokenized(TypedDict):
    """Their text."""

    prompt: str
