"""POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request, Response

from sash.server.errors import ApiError
from sash.server.prompts import aside, encode_texts, fit
from sash.server.protocol.completions import REFUSED, Completion, CompletionRequest
from sash.server.replies.common import Head
from sash.server.replies.completions import CompletionReply
from sash.server.routing import answer_responses, new_router
from sash.server.sampling import sampling_params
from sash.server.serving import Work, answer
from sash.server.state import ServerState, state_of
from sash.server.structured import structured_of
from sash.spec.sampling import SamplingParams

router = new_router("generation")


@router.post("/v1/completions", response_class=Response, responses=answer_responses(Completion))
async def completions(
    body: CompletionRequest, request: Request, state: Annotated[ServerState, Depends(state_of)]
) -> Response:
    """Go on with texts."""
    return await answer(request, state, await prepare(body, state))


def params_of(body: CompletionRequest, state: ServerState) -> SamplingParams:
    """What a body wants of the sampler. Raises ApiError or RequestError where anything but its prompts is wrong."""
    state.check_model(body.model)
    body.ignored(REFUSED)
    _check(body)
    if (count := len(listed(body))) > state.settings.max_prompts:
        told = f"prompt: at most {state.settings.max_prompts} in one request, got {count}"
        raise ApiError(400, told, param="prompt")
    return _params(body, state)


async def prepare(body: CompletionRequest, state: ServerState) -> Work:
    """What is to be done for a body. Raises ApiError or RequestError."""
    params = params_of(body, state)
    state.check_serving()
    prompts = await _prompts(body, state, params)
    head = Head.new("cmpl", state.check_model(body.model))
    echoed = sum(map(len, prompts)) if body.echo else 0
    reply = await aside(echoed, lambda: CompletionReply(body, head, prompts, state.engine.tokenizer))
    return Work(prompts, params, reply, bool(body.stream), body.ignored(REFUSED))


def _check(body: CompletionRequest) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, f"best_of must be n, which is {body.n or 1}: all answers are returned", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens must be at least 1 (0 only with echo)", param="max_tokens")
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs can't be streamed; use echo with logprobs", param="prompt_logprobs")


def _params(body: CompletionRequest, state: ServerState) -> SamplingParams:
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    scores = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        scores = max(scores or 0, body.logprobs)
    elif max_tokens == 0:
        scores = scores or 0  # the engine takes no request that asks for nothing
    return sampling_params(
        body,
        state.default_sampling,
        state.engine.tokenizer,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=scores,
        structured_outputs=structured_of(body),
    )


def listed(body: CompletionRequest) -> list[str] | list[list[int]]:
    """The prompts as a list, where there is one, too."""
    given: Any = body.prompt
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


async def _prompts(body: CompletionRequest, state: ServerState, params: SamplingParams) -> list[list[int]]:
    prompts: Any = listed(body)
    if isinstance(prompts[0], str):
        add_bos = body.add_special_tokens is not False
        prompts = await encode_texts(state, prompts, add_bos=add_bos, param="prompt")
    keep, max_tokens = body.truncate_prompt_tokens, params.max_tokens
    return [fit(state, ids, keep=keep, max_tokens=max_tokens, param="prompt") for ids in prompts]
