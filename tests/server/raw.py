"""An ASGI app called as a server calls it, with a client that leaves or doesn't read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.server.fake import FakeEngine

from sash.server.app import create_app
from sash.server.settings import ServerSettings


class RawCall:
    """One POST under way. ``parts`` are the bodies that were sent; ``read`` holds them back while it is cleared."""

    def __init__(self, engine: FakeEngine, path: str, body: object, **settings: Any) -> None:
        self.app = create_app(engine, ServerSettings(**({"model_name": "tiny"} | settings)))
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.parts: list[bytes] = []
        self.ended = False
        self.read = asyncio.Event()
        self.read.set()
        self._news = asyncio.Event()
        self._gone = asyncio.Event()
        self._incoming: list[dict[str, Any]] = [{"type": "http.request", "body": json.dumps(body).encode()}]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("sash", 80),
        }
        self.task = asyncio.create_task(self.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._incoming:
            return self._incoming.pop(0)
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            await self.read.wait()
            self.parts.append(message.get("body", b""))
            self.ended = not message.get("more_body", False)
        self._news.set()

    @property
    def text(self) -> str:
        """All that was sent."""
        return b"".join(self.parts).decode()

    def leave(self) -> None:
        """The client closes the connection."""
        self._gone.set()

    async def until(self, text: str) -> None:
        """Wait until this has been sent."""
        while text not in self.text:
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), 20)

    async def end(self) -> None:
        """Wait until the app has returned."""
        await asyncio.wait_for(self.task, 20)
