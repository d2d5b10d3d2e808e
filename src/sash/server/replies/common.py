"""What the answers of both APIs are made of: their head, and chunks written as bytes around the text."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

import msgspec

from sash.engine.outputs import RequestOutput
from sash.server.protocol.common import Usage, usage_of

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Head:
    """What every answer and chunk begins with."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def new(cls, prefix: str, model: str) -> Head:
        """A head with an id of its own: ``prefix-…``."""
        return cls(f"{prefix}-{uuid.uuid4().hex}", model)

    def opening(self, kind: str) -> bytes:
        """The start of a chunk, up to its choices."""
        fields = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return b"data: " + encode(fields)[:-1]


def count_usage(wholes: list[RequestOutput]) -> Usage:
    """Tokens of all prompts, each once, and of all answers."""
    return usage_of(
        sum(len(whole.prompt_token_ids) for whole in wholes),
        sum(len(output.token_ids) for whole in wholes for output in whole.outputs),
    )


class ChoiceWriter:
    """Chunks of one choice. All that doesn't change between two chunks is encoded once.

    Args:
        opening: the chunk up to its choices.
        index: the choice's.
        before: what stands between the index and the text.
        after: what closes it.
        usage: the chunk says that its usage comes later.
    """

    def __init__(self, opening: bytes, index: int, before: bytes, after: bytes, *, usage: bool) -> None:
        self._start = opening + b',"choices":[{"index":%d,' % index
        self._before = self._start + before
        self._after = after + b',"logprobs":'
        self._null_usage = b',"usage":null' if usage else b""
        self._plain_end = self._after + b'null,"finish_reason":null}]' + self._null_usage + b"}\n\n"

    def text(self, text: str) -> bytes:
        """A chunk with nothing but text."""
        return self._before + encode(text) + self._plain_end

    def full(
        self,
        text: str,
        *,
        logprobs: object = None,
        finish_reason: str | None = None,
        choice: dict[str, object] | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        """A chunk with anything; ``choice`` are further fields of the choice."""
        parts = [self._before, encode(text), self._after, encode(logprobs), b',"finish_reason":', encode(finish_reason)]
        if choice:
            parts += [b",", encode(choice)[1:-1]]
        parts += [b"}]", self._null_usage if usage is None else b',"usage":' + encode(usage)]
        return b"".join([*parts, b"}\n\n"])


def usage_chunk(opening: bytes, usage: Usage) -> bytes:
    """The last chunk: no choices, the usage."""
    return opening + b',"choices":[],"usage":' + encode(usage) + b"}\n\n"
