"""A server that computes nothing: it replays a recorded stream at its recorded pace, through the same HTTP stack.

What a load generator and HTTP take of the machine is then known: run it in place of the server, and the engine alone
beside it.

    python -m sash.bench.serving.null_server RECORDING [--port 8001]
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sash.bench.serving.client import Answer

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


@dataclass(frozen=True, slots=True)
class Recording:
    """A stream to replay.

    ``first_s`` passes before the first event, then ``gaps_s`` in turn; ``chunks`` are the events of tokens, ``last``
    the one with the finish reason, ``usage`` the one with the counts ("" where there was none).
    """

    first_s: float
    gaps_s: tuple[float, ...]
    chunks: tuple[str, ...]
    last: str
    usage: str
    model: str

    @classmethod
    def of(cls, answer: Answer) -> Recording:
        """From an answer whose tokens came one in an event.

        Raises:
            ValueError: it has none.
        """
        events = [(event, at) for event, at in zip(answer.events, answer.times_s, strict=True) if event != "[DONE]"]
        documents = [json.loads(event) for event, _ in events]
        usage = next((event for (event, _), d in zip(events, documents, strict=True) if d.get("usage")), "")
        told = [(event, at) for (event, at), d in zip(events, documents, strict=True) if d.get("choices")]
        if len(told) < 2:
            raise ValueError("a recording needs an answer of two events at least")
        times = [at for _, at in told]
        gaps = tuple(later - sooner for sooner, later in itertools.pairwise(times))
        chunks = tuple(event for event, _ in told)
        return cls(times[0], gaps, chunks[:-1], chunks[-1], usage, documents[0].get("model", ""))

    def save(self, file: Path) -> None:
        """Write it as JSON."""
        file.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, file: Path) -> Recording:
        """Read what ``save`` wrote."""
        document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return cls(**document | {name: tuple(document[name]) for name in ("gaps_s", "chunks")})


class NullServer:
    """An ASGI app that answers every completion with the recording, as many tokens as asked for.

    Args:
        recording: the stream.
        pace: seconds between two events in place of the recorded ones.
    """

    def __init__(self, recording: Recording, pace: float | None = None) -> None:
        self._first_s = recording.first_s
        self._gaps_s = recording.gaps_s if pace is None else (pace,)
        self._chunks = [_event(chunk) for chunk in recording.chunks]
        self._last = _event(recording.last)
        self._usage = json.loads(recording.usage) if recording.usage else None
        self._model = recording.model
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["method"] == "POST":
            body = json.loads(await _body(receive))
            self._open += 1
            try:
                await self._replay(body, receive, send)
            finally:
                self._open -= 1
        else:
            models = {"object": "list", "data": [{"id": self._model, "object": "model", "owned_by": "nobody"}]}
            await _answer(send, json.dumps(models | {"open": self._open}).encode())

    async def _replay(self, body: dict[str, Any], receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(receive())
        try:
            await self._send_all(body, gone, send)
        finally:
            gone.cancel()

    async def _send_all(self, body: dict[str, Any], gone: asyncio.Future[Any], send: Send) -> None:
        count = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
        at = time.monotonic() + self._first_s
        for event, gap in zip(self._events(count, body), itertools.cycle(self._gaps_s), strict=False):
            # Held to a clock: what one sleep is too long, the next is shorter.
            if (rest := at - time.monotonic()) > 0:
                await asyncio.sleep(rest)
            if gone.done():
                return
            await send({"type": "http.response.body", "body": event, "more_body": True})
            at += gap
        await send({"type": "http.response.body", "body": self._tail(count, body), "more_body": False})

    def _events(self, count: int, body: dict[str, Any]) -> Iterable[bytes]:
        yield from itertools.islice(itertools.cycle(self._chunks), count - 1)
        yield self._last

    def _tail(self, count: int, body: dict[str, Any]) -> bytes:
        end = b"data: [DONE]\n\n"
        if self._usage is None or not (body.get("stream_options") or {}).get("include_usage"):
            return end
        prompt = body.get("prompt")
        length = len(prompt) if isinstance(prompt, list) else self._usage["usage"]["prompt_tokens"]
        counts = {"prompt_tokens": length, "completion_tokens": count, "total_tokens": length + count}
        return _event(json.dumps(self._usage | {"usage": counts})) + end


def _event(text: str) -> bytes:
    return b"data: " + text.encode() + b"\n\n"


async def _answer(send: Send, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _body(receive: Receive) -> bytes:
    parts = []
    more = True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def _lifespan(receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "lifespan.shutdown":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})


def main(recording: Path, port: int = 8001, host: str = "127.0.0.1", pace_ms: float | None = None) -> None:
    """Serve until a signal."""
    import uvicorn

    pace = None if pace_ms is None else pace_ms / 1000
    app = NullServer(Recording.load(recording), pace)
    uvicorn.run(app, host=host, port=port, log_level="warning", access_log=False)


if __name__ == "__main__":
    import typer

    typer.run(main)
