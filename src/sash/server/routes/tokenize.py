"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request, Response

from sash.server.errors import ApiError, error_responses
from sash.server.prompts import aside, encode_messages, encode_texts, tokenizer_of
from sash.server.protocol.tokenize import Detokenized, DetokenizeRequest, TokenizeRequest, Tokens
from sash.server.replies.common import encode
from sash.server.replies.logprobs import TokenNames
from sash.server.routing import new_router
from sash.server.serving import ignored_headers
from sash.server.state import ServerState, state_of

router = new_router("tokens")
_RESPONSES = error_responses(400, 401, 404, 413, 415)


@router.post("/tokenize", response_class=Response, responses={200: {"model": Tokens}, **_RESPONSES})
async def tokenize(
    body: TokenizeRequest, request: Request, state: Annotated[ServerState, Depends(state_of)]
) -> Response:
    """The token ids of a text or a conversation."""
    state.check_model(body.model)
    headers = ignored_headers(request, body.ignored({}))
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if body.messages is not None:
        ids = await encode_messages(state, body.messages, body)
    else:
        add_bos = body.add_special_tokens is not False
        ids = (await encode_texts(state, [body.prompt or ""], add_bos=add_bos, param="prompt", empty=True))[0]
    names = TokenNames(state.engine.tokenizer)
    texts = await aside(len(ids), lambda: list(map(names.name, ids))) if body.return_token_strs else None
    info = state.engine.info
    answer: Tokens = {
        "count": len(ids),
        "max_model_len": None if info is None else info.max_model_len,
        "tokens": ids,
        "token_strs": texts,
    }
    return Response(encode(answer), headers=headers, media_type="application/json")


@router.post("/detokenize", response_class=Response, responses={200: {"model": Detokenized}, **_RESPONSES})
async def detokenize(
    body: DetokenizeRequest, request: Request, state: Annotated[ServerState, Depends(state_of)]
) -> Response:
    """The text of token ids, control tokens included."""
    state.check_model(body.model)
    headers = ignored_headers(request, body.ignored({}))
    tokenizer = tokenizer_of(state, "tokens")
    text = await aside(len(body.tokens), lambda: tokenizer.decode(body.tokens, skip_special=False))
    answer: Detokenized = {"prompt": text}
    return Response(encode(answer), headers=headers, media_type="application/json")
