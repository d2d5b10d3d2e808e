"""Frames between processes: a length of four bytes, then a body; to and from the core's it is messages as msgpack."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Sequence

from sash.engine.messages import Message, decode, encode

_LENGTH = struct.Struct("<I")
# A prompt of a million tokens takes 5 MB.
MAX_FRAME = 1 << 30


def pack(body: bytes) -> bytes:
    """A body as a frame."""
    return _LENGTH.pack(len(body)) + body


def frame(messages: list[Message]) -> bytes:
    """Messages as one frame."""
    return pack(encode(messages))


class BodyReader:
    """Cuts a stream of bytes back into bodies."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes as they came; returns the body of every frame that is whole now.

        Raises:
            ValueError: the bytes are no frames.
        """
        if not self._data and len(data) >= _LENGTH.size and len(data) - _LENGTH.size == _LENGTH.unpack_from(data)[0]:
            return [data[_LENGTH.size :]]  # one whole frame, as nearly always
        self._data += data
        out: list[bytes] = []
        start = 0
        while len(self._data) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._data, start)
            if size > MAX_FRAME:
                raise ValueError(f"a frame of {size} bytes is no frame")
            end = start + _LENGTH.size + size
            if len(self._data) < end:
                break
            out.append(bytes(self._data[start + _LENGTH.size : end]))
            start = end
        if start:
            del self._data[:start]
        return out


class FrameReader:
    """Cuts a stream of bytes back into messages."""

    def __init__(self) -> None:
        self._bodies = BodyReader()

    def feed(self, data: bytes) -> list[Message]:
        """Take bytes as they came; returns the messages of every frame that is whole now.

        Raises:
            ValueError: the bytes are no frames of messages.
        """
        return [message for body in self._bodies.feed(data) for message in decode(body)]


class Channel:
    """Blocking side of the socket, in the core's process."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = FrameReader()

    def send(self, messages: list[Message]) -> None:
        """Raises OSError when the other side has gone."""
        self._socket.sendall(frame(messages))

    def receive(self, *, wait: bool) -> list[Message]:
        """What has come; with ``wait`` at least one message.

        Raises:
            EOFError: the other side has gone.
        """
        out: list[Message] = []
        while True:
            blocking = wait and not out
            try:
                data = self._socket.recv(1 << 20, 0 if blocking else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return out
            if not data:
                raise EOFError("the other side has closed the connection")
            out += self._reader.feed(data)

    def wait(self, others: Sequence[socket.socket]) -> None:
        """Return once something has come here or to one of the others."""
        poll = select.poll()
        for sock in (self._socket, *others):
            poll.register(sock, select.POLLIN)
        poll.poll()
