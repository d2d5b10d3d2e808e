"""/v1/responses: OpenAI's newer API for conversations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Literal

from fastapi import Depends, Query, Request, Response

from sash.server.errors import ApiError, as_api_error, error_responses
from sash.server.generation import generation
from sash.server.items import Item, items_of, messages_of
from sash.server.middleware import note
from sash.server.prompts import encode_messages, template_of
from sash.server.protocol.chat import ChatMessage, TemplateBody
from sash.server.protocol.responses import (
    INCLUDABLE,
    REFUSED,
    UNUSED,
    InputItems,
    ResponseDeleted,
    ResponseObject,
    ResponseRequest,
)
from sash.server.replies.common import encode
from sash.server.replies.responses import ResponseReply
from sash.server.responses import Stored
from sash.server.routing import answer_responses, new_router
from sash.server.sampling import sampling_params
from sash.server.serving import Work, answer, begin, note_answers, stream_of
from sash.server.state import ServerState, state_of
from sash.spec.errors import RequestError, SashError
from sash.spec.log import logger
from sash.spec.sampling import SamplingParams
from sash.spec.structured import StructuredOutputs
from sash.text.chat import end_turns

router = new_router("responses")
State = Annotated[ServerState, Depends(state_of)]
_FOUND = {200: {"model": ResponseObject}, **error_responses(400, 401, 404)}


@router.post(
    "/v1/responses", response_class=Response, responses=answer_responses(ResponseObject, end="response.completed")
)
async def create_response(body: ResponseRequest, request: Request, state: State) -> Response:
    """Answer a conversation."""
    work = await prepare(body, state)
    reply = work.reply
    assert isinstance(reply, ResponseReply)
    if not body.background and not body.stream:
        return await answer(request, state, work)
    headers = begin(request, state, work)
    if body.background:
        return Response(encode(await _later(state, work, reply)), 200, headers, "application/json")
    return stream_of(state, lambda: _events(request, state, work, reply), headers)


def params_of(body: ResponseRequest, state: ServerState) -> SamplingParams:
    """What a body wants of the sampler. Raises ApiError or RequestError where anything but its input is wrong."""
    state.check_model(body.model)
    body.ignored(REFUSED)
    _check(body)
    scores = INCLUDABLE in (body.include or ()) or body.top_logprobs is not None
    params = sampling_params(
        body,
        state.default_sampling,
        state.engine.tokenizer,
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if scores else None,
        prompt_logprobs=None,
        structured_outputs=_form(body),
    )
    return end_turns(params, template_of(state))


async def prepare(body: ResponseRequest, state: ServerState) -> Work:
    """What is to be done for a body. Raises ApiError or RequestError."""
    params = params_of(body, state)
    state.check_serving()
    earlier = _earlier(body, state)
    own = items_of(body.input)
    ids = await _encode(body, state, messages_of([*earlier, *own], body.instructions))
    reply = ResponseReply(
        body,
        state.check_model(body.model),
        params,
        store=None if body.store is False else state.responses,
        own=own,
        earlier=earlier,
        tokenizer=state.engine.tokenizer,
    )
    ignored = body.ignored(REFUSED)
    if set(body.include or ()) - {INCLUDABLE}:
        ignored.append("include")
    return Work([ids], params, reply, bool(body.stream), ignored)


def _check(body: ResponseRequest) -> None:
    for name in UNUSED:
        if getattr(body, name) not in (None, False) and (name, getattr(body, name)) != ("n", 1):
            raise ApiError(400, f"{name} is not supported here; leave it out", param=name)
    if body.background and body.stream:
        raise ApiError(400, "background and stream exclude each other; leave out one of them", param="background")
    if body.background and body.store is False:
        raise ApiError(400, "background needs store: without it the answer could never be read", param="background")
    if body.tool_choice not in (None, "auto", "none"):
        raise ApiError(400, "tool_choice is not supported; leave it out", param="tool_choice")


def _form(body: ResponseRequest) -> StructuredOutputs | None:
    """The form that the answer must have."""
    given = body.text.format if body.text is not None else None
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return StructuredOutputs(json_object=True, origin="text.format")
    if given.schema_ is None:
        raise ApiError(400, "text.format of type json_schema needs a schema", param="text.format.schema")
    try:
        return StructuredOutputs(json=given.schema_, lenient=not given.strict, origin="text.format")
    except RequestError as error:
        raise ApiError(400, str(error), param="text.format.schema") from None


def _earlier(body: ResponseRequest, state: ServerState) -> list[Item]:
    """The items of the conversation that a body goes on from."""
    if body.previous_response_id is None:
        return []
    stored = state.responses.get(body.previous_response_id)
    told = f"the previous response {body.previous_response_id[:100]!r} is not here"
    if stored is not None and stored.answer["status"] not in ("completed", "incomplete"):
        told = f"the previous response is {stored.answer['status']}; go on from one that has ended"
        stored = None
    if stored is None:
        raise ApiError(400, told, param="previous_response_id", code="previous_response_not_found")
    return stored.history


async def _encode(body: ResponseRequest, state: ServerState, messages: list[ChatMessage]) -> list[int]:
    """Token ids; with truncation of as many messages, from a user's on, as leave room for the answer."""
    if not messages:
        raise ApiError(400, "input is empty; give a text or at least one item", param="input")
    how = TemplateBody.model_validate({"chat_template_kwargs": body.chat_template_kwargs})

    async def encoded(start: int) -> list[int]:
        return await encode_messages(state, messages[:fixed] + messages[start:], how)

    fixed = int(messages[0].role in ("system", "developer"))
    ids = await encoded(fixed)
    info = state.engine.info
    if info is None:
        return ids
    room = info.max_model_len - (body.max_output_tokens or 1)
    starts = [i for i in range(fixed + 1, len(messages)) if messages[i].role == "user"]
    low, high = 0, len(starts) - 1
    cuts = body.truncation == "auto" and len(ids) > room
    while cuts and low <= high:
        middle = (low + high) // 2
        shorter = await encoded(starts[middle])
        if len(shorter) <= room:
            ids, high = shorter, middle - 1
        else:
            low = middle + 1
    if len(ids) < info.max_model_len:
        return ids
    told = f"input: the maximum context length is {info.max_model_len} tokens and the prompt has {len(ids)}: shorten it"
    if body.truncation != "auto":
        told += ", or have its oldest items left out with truncation: auto"
    raise ApiError(400, told, param="input", code="context_length_exceeded")


async def _events(
    request: Request, state: ServerState, work: Work, reply: ResponseReply
) -> AsyncGenerator[bytes, None]:
    stream = reply.stream()
    async with generation(state.engine, work.prompts, work.params) as run:
        yield stream.begin()
        try:
            async for batch in run.deltas():
                data = stream.chunks(batch)
                if data:
                    yield data
            wholes = await run.finished()
            note_answers(request, wholes)
            yield stream.end(wholes)
        except SashError as error:
            told = as_api_error(error)
            note(request.scope, error=told.code or str(told.status))
            yield stream.failed(told)


async def _later(state: ServerState, work: Work, reply: ResponseReply) -> ResponseObject:
    """Begin in the background. Raises what the engine says to a request that it doesn't take."""
    taken: asyncio.Future[ResponseObject] = asyncio.get_running_loop().create_future()

    async def run() -> None:
        try:
            async with generation(state.engine, work.prompts, work.params) as run:
                taken.set_result(reply.keep(reply.answer("in_progress"), asyncio.current_task()))
                reply.ended(await run.finished())
        except asyncio.CancelledError:
            # Unless it was deleted meanwhile.
            if reply.id in state.responses:
                reply.keep(reply.answer("cancelled"))
            raise
        except Exception as error:  # whoever asks for the answer is to hear of it
            if not taken.done():
                taken.set_exception(error)
                return
            if not isinstance(error, SashError):
                logger().error("response_failed", response=reply.id, exc_info=error)
                error = ApiError(500, "the server failed on this request")
            reply.keep(reply.answer("failed", error=as_api_error(error)))

    task = asyncio.create_task(run())
    try:
        return await taken
    except asyncio.CancelledError:
        task.cancel()
        raise


def _stored(response_id: str, state: ServerState) -> Stored:
    stored = state.responses.get(response_id)
    if stored is None:
        told = f"there is no response {response_id[:100]!r}; they are kept in memory, and the oldest give way"
        raise ApiError(404, told, param="response_id", code="response_not_found")
    return stored


@router.get("/v1/responses/{response_id}", response_class=Response, responses=_FOUND)
async def get_response(response_id: str, state: State, stream: bool = False) -> Response:
    """An answer that was kept."""
    if stream:
        raise ApiError(400, "stream is not supported here; read the answer whole", param="stream")
    return _json(_stored(response_id, state).answer)


@router.delete(
    "/v1/responses/{response_id}",
    response_class=Response,
    responses={200: {"model": ResponseDeleted}, **error_responses(401, 404)},
)
async def delete_response(response_id: str, state: State) -> Response:
    """Forget an answer; one that is still being made is stopped."""
    stored = _stored(response_id, state)
    state.responses.remove(response_id)
    if stored.task is not None:
        stored.task.cancel()
    answer: ResponseDeleted = {"id": response_id, "object": "response", "deleted": True}
    return _json(answer)


@router.post("/v1/responses/{response_id}/cancel", response_class=Response, responses=_FOUND)
async def cancel_response(response_id: str, state: State) -> Response:
    """Stop an answer that is being made in the background; one that has ended stays as it is."""
    stored = _stored(response_id, state)
    if not stored.answer["background"]:
        told = "only responses with background: true can be cancelled; close the connection of others"
        raise ApiError(400, told, param="response_id")
    if stored.task is not None:
        stored.task.cancel()
        await asyncio.wait([stored.task])
    return _json(_stored(response_id, state).answer)


@router.get(
    "/v1/responses/{response_id}/input_items",
    response_class=Response,
    responses={200: {"model": InputItems}, **error_responses(400, 401, 404)},
)
async def response_input(
    response_id: str,
    state: State,
    after: Annotated[str | None, Query(description="Id of the item after which to go on.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """The items that an answer was made of, newest first; not those of the answers before it."""
    items = _stored(response_id, state).own[:: 1 if order == "asc" else -1]
    start = 0 if after is None else next((i + 1 for i, item in enumerate(items) if item["id"] == after), None)
    if start is None:
        raise ApiError(400, f"after: there is no item {str(after)[:100]!r} among them", param="after")
    page = items[start : start + limit]
    answer: InputItems = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > start + limit,
    }
    return _json(answer)


def _json(answer: object) -> Response:
    return Response(encode(answer), media_type="application/json")
