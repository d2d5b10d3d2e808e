"""Chat answers with tool calls, whole and as a stream."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from sash.engine.outputs import CompletionOutput, RequestOutput
from sash.server.generation import check_ending
from sash.server.protocol.chat import ChatChoice, ChatDelta, ChatRequest
from sash.server.protocol.common import usage_of
from sash.server.protocol.tools import ToolCall, ToolCallDelta
from sash.server.replies.chat import ChatReply, ChatStream
from sash.server.replies.common import Head, encode
from sash.server.tools.parser import CallPiece, Piece, ToolParser
from sash.server.tools.toolbox import Toolbox
from sash.text.base import Tokenizer


class ToolReply(ChatReply):
    """The answer to a body with tools: text, calls, or both."""

    def __init__(self, body: ChatRequest, head: Head, tokenizer: Tokenizer | None, toolbox: Toolbox) -> None:
        super().__init__(body, head, tokenizer)
        self.toolbox = toolbox

    def _choice(self, output: CompletionOutput) -> ChatChoice:
        choice = super()._choice(output)
        parser = self.toolbox.parser()
        pieces = [*parser.push(output.text), *parser.finish(cut=_cut(output))]
        text, calls = _gathered(pieces)
        if calls:
            message = choice["message"]
            message["content"], message["tool_calls"] = text.rstrip() or None, calls
            choice["finish_reason"] = _reason(output, calls)
        else:
            choice["message"]["content"] = text
        return choice

    def stream(self) -> ToolStream:
        """The same as a stream."""
        return ToolStream(self)


def _gathered(pieces: Sequence[Piece]) -> tuple[str, list[ToolCall]]:
    """An answer's text and its calls."""
    text, names, arguments = [], list[str](), list[str]()
    for piece in pieces:
        if isinstance(piece, str):
            text.append(piece)
            continue
        if piece.name is not None:
            names.append(piece.name)
            arguments.append("")
        arguments[piece.index] += piece.arguments
    calls: list[ToolCall] = [
        {"id": new_id(), "type": "function", "function": {"name": name, "arguments": given}}
        for name, given in zip(names, arguments, strict=True)
    ]
    return "".join(text), calls


def new_id() -> str:
    """The id of a call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def _cut(output: CompletionOutput) -> bool:
    """Whether the answer would have gone on."""
    return output.finish_reason in ("length", "timeout")


def _reason(output: CompletionOutput, calls: object) -> str:
    """An answer that calls ends with that, unless it was cut off."""
    reason = output.finish_reason or "stop"
    return "tool_calls" if calls and reason == "stop" else reason


class ToolStream(ChatStream):
    """Deltas to the bytes of chunks: the role, then text, and for each call its name and pieces of its arguments."""

    def __init__(self, reply: ToolReply) -> None:
        super().__init__(reply)
        self._parsers = [reply.toolbox.parser() for _ in range(reply.n)]

    def _chunk(self, delta: RequestOutput) -> bytes:
        output = delta.outputs[0]
        choice, parser = self._choices[output.index], self._parsers[output.index]
        check_ending(output, sent=self._sent)
        data = b""
        if not choice.begun:
            data = self._role(output.index, delta)
            choice.begun = self._sent = True
        pieces = parser.push(output.text)
        if output.finish_reason is not None:
            pieces += parser.finish(cut=_cut(output))
        deltas = [_delta(piece) for piece in pieces]
        choice.num_tokens += len(output.token_ids)
        if not deltas and (output.finish_reason is not None or not self._plain):
            deltas = [{"content": ""} if not parser.count else {}]
        for place, part in enumerate(deltas):
            data += self._write(delta, part, parser, first=place == 0, last=place == len(deltas) - 1)
        return data

    def _write(self, delta: RequestOutput, part: ChatDelta, parser: ToolParser, *, first: bool, last: bool) -> bytes:
        """One chunk. What a delta says beside its text stands in its first chunk, how it ended in its last."""
        body, output = self._reply.body, delta.outputs[0]
        fields: dict[str, object] = {"index": output.index, "delta": part, "logprobs": None, "finish_reason": None}
        if first:
            fields["logprobs"] = self._reply.logprobs(output.token_ids, output.logprobs)
            if body.return_token_ids:
                fields["token_ids"] = output.token_ids
        if last and output.finish_reason is not None:
            fields["finish_reason"] = _reason(output, parser.count)
            fields["stop_reason"] = output.stop_reason
        top: dict[str, object] = {"choices": [fields]}
        if self._include_usage:
            tokens = self._choices[output.index].num_tokens
            top["usage"] = usage_of(len(delta.prompt_token_ids), tokens) if body.continuous_usage else None
        return self._opening + b"," + encode(top)[1:] + b"\n\n"


def _delta(piece: Piece) -> ChatDelta:
    if isinstance(piece, str):
        return {"content": piece}
    if piece.name is not None:
        return _begun(piece)
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.arguments}}]}


def _begun(piece: CallPiece) -> ChatDelta:
    """The first chunk of a call."""
    call: ToolCallDelta = {
        "index": piece.index,
        "id": new_id(),
        "type": "function",
        "function": {"name": piece.name or "", "arguments": piece.arguments},
    }
    return {"tool_calls": [call]}
