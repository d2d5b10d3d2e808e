"""From prompts and parameters to an HTTP answer, whole or streamed; the same for every endpoint that generates."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fastapi import Request, Response

from sash.engine.outputs import RequestOutput
from sash.server.generation import Batch, generation
from sash.server.middleware import note, request_id_of
from sash.server.sse import Events, EventStream, until_client_leaves
from sash.server.state import ServerState
from sash.spec.log import logger
from sash.spec.sampling import SamplingParams

# Names of ignored fields come from the client and go into a header.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_MOST_NAMES = 20


class StreamReply(Protocol):
    """Makes bytes of deltas."""

    def chunks(self, batch: Batch) -> bytes:
        """What a batch has to say, maybe nothing. Raises ApiError for an answer that failed."""

    def end(self, wholes: list[RequestOutput]) -> bytes:
        """The end of the stream."""


class Reply(Protocol):
    """Makes an endpoint's answer."""

    def whole(self, wholes: list[RequestOutput]) -> bytes:
        """The answer as JSON. Raises ApiError where one of them is none."""

    def stream(self) -> StreamReply:
        """The answer as a stream."""


@dataclass(slots=True)
class Work:
    """What an endpoint has understood of a body: prompts, what is wanted of them, and how to tell it. ``ignored`` are
    fields that it doesn't know."""

    prompts: list[list[int]]
    params: SamplingParams
    reply: Reply
    stream: bool
    ignored: list[str] = field(default_factory=list)


async def answer(request: Request, state: ServerState, work: Work) -> Response:
    """Do the work. A client that leaves ends it at once.

    Raises:
        RequestError, OverloadedError, EngineDeadError, ApiError: as an answer that isn't one.
        ClientGoneError: nobody waits for it.
    """
    headers = begin(request, state, work)
    if work.stream:
        return stream_of(state, lambda: _events(request, state, work), headers)
    async with (
        until_client_leaves(request.receive),
        generation(state.engine, work.prompts, work.params) as run,
    ):
        wholes = await run.finished()
    note_answers(request, wholes)
    return Response(work.reply.whole(wholes), headers=headers, media_type="application/json")


def begin(request: Request, state: ServerState, work: Work) -> dict[str, str]:
    """Tell the log what is to be done, and return headers that tell the client."""
    note(request.scope, prompt_tokens=sum(map(len, work.prompts)), answers=len(work.prompts) * work.params.n)
    if state.settings.log_prompts:
        tokenizer = state.engine.tokenizer
        prompts = [ids if tokenizer is None else tokenizer.decode(ids, skip_special=False) for ids in work.prompts]
        logger().info("prompts", request_id=request_id_of(request.scope), prompts=prompts)
    return ignored_headers(request, work.ignored)


def stream_of(state: ServerState, events: Events, headers: Mapping[str, str]) -> EventStream:
    """An answer as events, with the settings' times."""
    settings = state.settings
    return EventStream(events, headers, heartbeat_s=settings.heartbeat_s, stall_s=settings.request_timeout_s)


async def whole_answer(state: ServerState, work: Work) -> bytes:
    """The answer for somebody who is no HTTP request: all of it, as JSON. Raises as ``answer`` does."""
    async with generation(state.engine, work.prompts, work.params) as run:
        return work.reply.whole(await run.finished())


async def _events(request: Request, state: ServerState, work: Work) -> AsyncGenerator[bytes, None]:
    reply = work.reply.stream()
    async with generation(state.engine, work.prompts, work.params) as run:
        async for batch in run.deltas():
            data = reply.chunks(batch)
            if data:
                yield data
        wholes = await run.finished()
    note_answers(request, wholes)
    yield reply.end(wholes)


def ignored_headers(request: Request, ignored: list[str]) -> dict[str, str]:
    """The header that tells which fields had no effect; they are logged, too."""
    if not ignored:
        return {}
    names = [name for name in ignored if _NAME.fullmatch(name)][:_MOST_NAMES]
    if len(names) < len(ignored):
        names.append("...")
    logger().info("fields_ignored", request_id=request_id_of(request.scope), fields=names)
    return {"X-Sash-Ignored": ", ".join(names)}


def note_answers(request: Request, wholes: list[RequestOutput]) -> None:
    """Tell the log what has come of it."""
    outputs = [output for whole in wholes for output in whole.outputs]
    reasons = sorted({str(output.finish_reason) for output in outputs})
    note(
        request.scope,
        completion_tokens=sum(len(output.token_ids) for output in outputs),
        finish_reasons=",".join(reasons),
    )
