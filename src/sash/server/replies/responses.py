"""Answers of /v1/responses, whole and as events."""

from __future__ import annotations

import asyncio
import time
import uuid

from sash.engine.outputs import CompletionOutput, RequestOutput
from sash.server.errors import ApiError
from sash.server.generation import Batch, check_ending
from sash.server.items import Item
from sash.server.protocol.chat import TokenLogprob
from sash.server.protocol.responses import (
    OutputMessage,
    OutputText,
    ResponseObject,
    ResponseRequest,
    ResponseUsage,
    Status,
)
from sash.server.replies.common import count_usage, encode
from sash.server.replies.logprobs import TokenNames, chat_logprobs
from sash.server.responses import ResponseStore, Stored
from sash.spec.sampling import SamplingParams
from sash.text.base import Tokenizer


class ResponseReply:
    """The answer to one body.

    Args:
        body: what was asked.
        model: the name to answer with.
        params: the sampler's.
        store: where the answer is kept, None where it isn't.
        own: the input's items.
        earlier: items of the conversation before.
        tokenizer: None where only ids go in and out.
    """

    def __init__(
        self,
        body: ResponseRequest,
        model: str,
        params: SamplingParams,
        *,
        store: ResponseStore | None,
        own: list[Item],
        earlier: list[Item],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self.item_id = f"msg_{uuid.uuid4().hex}"
        self._body = body
        self._model = model
        self._params = params
        self._created = int(time.time())
        self._store = store
        self._own = own
        self._earlier = earlier
        self._names = TokenNames(tokenizer)

    def answer(
        self,
        status: Status,
        *,
        output: list[OutputMessage] | None = None,
        usage: ResponseUsage | None = None,
        error: ApiError | None = None,
    ) -> ResponseObject:
        """The response object in some state."""
        body = self._body
        ended = status not in ("queued", "in_progress")
        # The client's library knows few codes; this is the one for whatever isn't the request's fault.
        failure = None if error is None else {"code": "server_error", "message": str(error)}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if ended else None,
            "status": status,
            "background": bool(body.background),
            "error": failure,  # type: ignore[typeddict-item]
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": output or [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": self._store is not None,
            "temperature": self._params.temperature,
            "text": {"format": _format(body)},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self._params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": usage,
            "user": body.user,
        }

    def ended(self, wholes: list[RequestOutput]) -> ResponseObject:
        """The answer when all is there; it is kept. Raises ApiError where it is none."""
        output = wholes[0].outputs[0]
        check_ending(output, sent=False)
        incomplete = output.finish_reason == "length"
        message = self.message(output.text, self.logprobs(output), "incomplete" if incomplete else "completed")
        counted = count_usage(wholes)
        usage: ResponseUsage = {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counted["total_tokens"],
        }
        return self.keep(self.answer("incomplete" if incomplete else "completed", output=[message], usage=usage))

    def keep(self, answer: ResponseObject, task: asyncio.Task[None] | None = None) -> ResponseObject:
        """Keep a state of the answer where it is to be kept; ``task`` goes on making it."""
        if self._store is not None:
            self._store.put(Stored(answer, self._own, self._earlier, task))
        return answer

    def whole(self, wholes: list[RequestOutput]) -> bytes:
        """The answer as JSON. Raises ApiError where it is none."""
        return encode(self.ended(wholes))

    def message(self, text: str, logprobs: list[TokenLogprob], status: str) -> OutputMessage:
        """The answer's item."""
        return {
            "id": self.item_id,
            "type": "message",
            "status": status,  # type: ignore[typeddict-item]
            "role": "assistant",
            "content": [part(text, logprobs)],
        }

    def logprobs(self, output: CompletionOutput) -> list[TokenLogprob]:
        """Scores of tokens where they are asked for."""
        if self._params.logprobs is None:
            return []
        return chat_logprobs(self._names, output.token_ids, output.logprobs or [], self._params.logprobs)["content"]

    def stream(self) -> ResponseStream:
        """The same as events."""
        return ResponseStream(self)


def part(text: str, logprobs: list[TokenLogprob]) -> OutputText:
    """The content of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _format(body: ResponseRequest) -> dict[str, object]:
    given = body.text.format if body.text is not None else None
    return {"type": "text"} if given is None else given.model_dump(by_alias=True, exclude_none=True)


class ResponseStream:
    """Deltas to events: the answer is created, an item and its part are added, text comes, and all of it is done."""

    def __init__(self, reply: ResponseReply) -> None:
        self._reply = reply
        self._number = 0
        self._place = {"item_id": reply.item_id, "output_index": 0, "content_index": 0}
        kind = "response.output_text.delta"
        self._delta = f"event: {kind}\ndata: ".encode() + encode({"type": kind, **self._place})[:-1]

    def begin(self) -> bytes:
        """What comes before any text."""
        reply = self._reply
        answer = reply.answer("in_progress")
        item = {**reply.message("", [], "in_progress"), "content": []}
        return b"".join(
            (
                self._event("response.created", response=answer),
                self._event("response.in_progress", response=answer),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", **self._place, part=part("", [])),
            )
        )

    def chunks(self, batch: Batch) -> bytes:
        """The text of a batch as one event, maybe none. Raises ApiError for an answer that failed."""
        outputs = [delta.outputs[0] for _, deltas in batch for delta in deltas]
        text = "".join([output.text for output in outputs])
        check_ending(outputs[-1], sent=False)
        logprobs = [entry for output in outputs for entry in self._reply.logprobs(output)]
        if not text and not logprobs:
            return b""
        fields = (b',"delta":', encode(text), b',"logprobs":', encode(logprobs), b',"sequence_number":')
        return b"".join((self._delta, *fields, b"%d}\n\n" % self._next()))

    def end(self, wholes: list[RequestOutput]) -> bytes:
        """The end of the stream."""
        answer = self._reply.ended(wholes)
        item = answer["output"][0]
        content = item["content"][0]
        done = {**self._place, "text": content["text"], "logprobs": content["logprobs"]}
        return b"".join(
            (
                self._event("response.output_text.done", **done),
                self._event("response.content_part.done", **self._place, part=content),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(f"response.{answer['status']}", response=answer),
            )
        )

    def failed(self, error: ApiError) -> bytes:
        """The end of a stream that can't go on."""
        answer = self._reply.keep(self._reply.answer("failed", error=error))
        return self._event("response.failed", response=answer)

    def _event(self, kind: str, **fields: object) -> bytes:
        data = encode({"type": kind, **fields, "sequence_number": self._next()})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _next(self) -> int:
        self._number += 1
        return self._number - 1
