"""HTTP whose heads end: uvicorn's parser takes lines and headers of any length, for as long as they come."""

from __future__ import annotations

import asyncio
import re

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
HEAD_S = 30.0
_UPGRADE = re.compile(rb"(?i)(?<=\r\n)upgrade(?=:)")


class BoundedHttp(HttpToolsProtocol):
    """Cuts a connection whose request line and headers together exceed ``MAX_HEAD_BYTES`` (with status 400), or don't
    end within ``HEAD_S`` after the connection or the request has begun. Offers of another protocol (h2c, from clients
    that like HTTP/2) are ignored, as RFC 9110 section 7.8 allows: the parser would drop the body."""

    _whole_bytes = 0  # of lines that the parser has read to their end
    _raw_bytes = 0  # of whole reads inside a head, all of which the parser may hold back
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(transport)
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        unfinished = self._deadline
        if unfinished is not None:
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"ignored", head) + end + rest  # of the same length
        super().data_received(data)
        if unfinished is not None and self._deadline is unfinished and not self.transport.is_closing():
            self._raw_bytes += len(data)
            if self._raw_bytes > MAX_HEAD_BYTES:
                self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        """See httptools."""
        super().on_message_begin()
        self._begin()

    def on_url(self, url: bytes) -> None:
        """See httptools."""
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._end()
        super().on_headers_complete()

    def _begin(self) -> None:
        self._end()
        self._whole_bytes = self._raw_bytes = 0
        self._deadline = self.loop.call_later(HEAD_S, self.transport.close)

    def _end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _count(self, size: int) -> None:
        """Raises ValueError, which the parser makes a status 400, where one read brings a whole head at once."""
        self._whole_bytes += size
        if self._whole_bytes > MAX_HEAD_BYTES:
            raise ValueError("the head of the request is too large")
