"""Answers of /v1/chat/completions, whole and as a stream."""

from __future__ import annotations

from sash.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from sash.server.generation import Batch, check_ending
from sash.server.protocol.chat import ChatChoice, ChatCompletion, ChatLogprobs, ChatRequest
from sash.server.protocol.common import usage_of
from sash.server.replies.common import ChoiceWriter, Head, count_usage, encode, usage_chunk
from sash.server.replies.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from sash.server.sse import DONE
from sash.text.base import Tokenizer

_ROLE = {"role": "assistant", "content": ""}


class ChatReply:
    """The answer to one body.

    Args:
        body: what was asked.
        head: id, model and time.
        tokenizer: None where only ids go in and out.
    """

    def __init__(self, body: ChatRequest, head: Head, tokenizer: Tokenizer | None) -> None:
        self.body = body
        self.head = head
        self.n = body.n or 1
        self.names = TokenNames(tokenizer, bool(body.return_tokens_as_token_ids))

    def whole(self, wholes: list[RequestOutput]) -> bytes:
        """The answer as JSON. Raises ApiError where one of them is none."""
        answer: ChatCompletion = {
            "id": self.head.id,
            "object": "chat.completion",
            "created": self.head.created,
            "model": self.head.model,
            "choices": [self._choice(output) for output in wholes[0].outputs],
            "usage": count_usage(wholes),
        }
        if self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(self.names, wholes[0].prompt_logprobs)
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = wholes[0].prompt_token_ids
        return encode(answer)

    def _choice(self, output: CompletionOutput) -> ChatChoice:
        check_ending(output, sent=False)
        choice: ChatChoice = {
            "index": output.index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self.logprobs(output.token_ids, output.logprobs),
            "finish_reason": output.finish_reason or "stop",
            "stop_reason": output.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def logprobs(self, tokens: list[int], positions: list[PositionLogprobs] | None) -> ChatLogprobs | None:
        """Scores of tokens where they are asked for."""
        if not self.body.logprobs:
            return None
        return chat_logprobs(self.names, tokens, positions or [], self.body.top_logprobs or 0)

    def stream(self) -> ChatStream:
        """The same as a stream."""
        return ChatStream(self)


class _Choice:
    """One choice under way."""

    def __init__(self, writer: ChoiceWriter) -> None:
        self.writer = writer
        self.num_tokens = 0
        self.begun = False


class ChatStream:
    """Deltas to the bytes of chunks: the role first, then text."""

    def __init__(self, reply: ChatReply) -> None:
        body = reply.body
        self._reply = reply
        self._opening = reply.head.opening("chat.completion.chunk")
        self._include_usage = body.include_usage
        # Fields beside the text make a chunk of every delta.
        self._plain = not body.logprobs and not body.return_token_ids and not body.continuous_usage
        self._choices = [
            _Choice(ChoiceWriter(self._opening, i, b'"delta":{"content":', b"}", usage=self._include_usage))
            for i in range(reply.n)
        ]
        self._sent = False

    def chunks(self, batch: Batch) -> bytes:
        """What a batch of deltas has to say, maybe nothing. Raises ApiError for an answer that failed."""
        return b"".join([self._chunk(delta) for _, deltas in batch for delta in deltas])

    def end(self, wholes: list[RequestOutput]) -> bytes:
        """The end of the stream."""
        return usage_chunk(self._opening, count_usage(wholes)) + DONE if self._include_usage else DONE

    def _chunk(self, delta: RequestOutput) -> bytes:
        output = delta.outputs[0]
        choice = self._choices[output.index]
        text, reason = output.text, output.finish_reason
        if choice.begun and self._plain and reason is None:
            return choice.writer.text(text) if text else b""
        check_ending(output, sent=self._sent)
        data = b""
        if not choice.begun:
            data = self._role(output.index, delta)
            choice.begun = self._sent = True
        if text or reason is not None or not self._plain:
            data += self._full(choice, delta)
        return data

    def _role(self, index: int, delta: RequestOutput) -> bytes:
        """The first chunk of a choice."""
        fields = {"index": index, "delta": _ROLE, "logprobs": None, "finish_reason": None}
        top: dict[str, object] = {"choices": [fields]}
        if self._include_usage:
            top["usage"] = usage_of(len(delta.prompt_token_ids), 0) if self._reply.body.continuous_usage else None
        if self._reply.body.return_token_ids:
            top["prompt_token_ids"] = delta.prompt_token_ids
        return self._opening + b"," + encode(top)[1:] + b"\n\n"

    def _full(self, choice: _Choice, delta: RequestOutput) -> bytes:
        body, output = self._reply.body, delta.outputs[0]
        fields: dict[str, object] = {}
        if output.finish_reason is not None:
            fields["stop_reason"] = output.stop_reason
        if body.return_token_ids:
            fields["token_ids"] = output.token_ids
        choice.num_tokens += len(output.token_ids)
        return choice.writer.full(
            output.text,
            logprobs=self._reply.logprobs(output.token_ids, output.logprobs),
            finish_reason=output.finish_reason,
            choice=fields,
            usage=usage_of(len(delta.prompt_token_ids), choice.num_tokens) if body.continuous_usage else None,
        )
