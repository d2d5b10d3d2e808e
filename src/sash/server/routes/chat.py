"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request, Response

from sash.server.errors import ApiError
from sash.server.prompts import encode_messages, fit, template_of
from sash.server.protocol.chat import REFUSED, ChatCompletion, ChatRequest
from sash.server.replies.chat import ChatReply
from sash.server.replies.common import Head
from sash.server.replies.tools import ToolReply
from sash.server.routing import answer_responses, new_router
from sash.server.sampling import sampling_params
from sash.server.serving import Work, answer
from sash.server.state import ServerState, state_of
from sash.server.structured import structured_of
from sash.server.tools.formats import format_of
from sash.server.tools.toolbox import Toolbox, toolbox_of
from sash.spec.sampling import SamplingParams
from sash.text.chat import end_turns

router = new_router("generation")


@router.post("/v1/chat/completions", response_class=Response, responses=answer_responses(ChatCompletion))
async def chat(body: ChatRequest, request: Request, state: Annotated[ServerState, Depends(state_of)]) -> Response:
    """Answer a conversation."""
    return await answer(request, state, await prepare(body, state))


def params_of(body: ChatRequest, state: ServerState) -> SamplingParams:
    """What a body wants of the sampler. Raises ApiError or RequestError where anything but its messages is wrong."""
    state.check_model(body.model)
    body.ignored(REFUSED)
    _check(body)
    toolbox, form = _toolbox(body, state), structured_of(body)
    if toolbox is not None:
        form = toolbox.constraint(form)
        if toolbox.controls:  # else the marks of calls would be left out of the text
            body = body.model_copy(update={"skip_special_tokens": False})
    params = sampling_params(
        body,
        state.default_sampling,
        state.engine.tokenizer,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        structured_outputs=form,
    )
    return end_turns(params, template_of(state, body.chat_template))


async def prepare(body: ChatRequest, state: ServerState) -> Work:
    """What is to be done for a body. Raises ApiError or RequestError."""
    params, toolbox = params_of(body, state), _toolbox(body, state)
    state.check_serving()
    ids = await encode_messages(state, body.messages, body, toolbox)
    keep, max_tokens = body.truncate_prompt_tokens, params.max_tokens
    prompts = [fit(state, ids, keep=keep, max_tokens=max_tokens, param="messages")]
    head = Head.new("chatcmpl", state.check_model(body.model))
    reply = ChatReply(body, head, state.engine.tokenizer)
    if toolbox is not None:
        reply = ToolReply(body, head, state.engine.tokenizer, toolbox)
    return Work(prompts, params, reply, bool(body.stream), body.ignored(REFUSED))


def _toolbox(body: ChatRequest, state: ServerState) -> Toolbox | None:
    template = template_of(state, body.chat_template)
    return toolbox_of(body, format_of(template, state.settings.tool_call_parser), template, state.engine.tokenizer)


def _check(body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs can't be streamed; leave out one of them", param="prompt_logprobs")
