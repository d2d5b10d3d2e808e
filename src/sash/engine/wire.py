"""Frames between the core's process and whoever talks to it: a length of four bytes, then messages as msgpack."""

from __future__ import annotations

import socket
import struct

from sash.engine.messages import Message, decode, encode

_LENGTH = struct.Struct("<I")
# A prompt of a million tokens takes 5 MB.
MAX_FRAME = 1 << 30


def frame(messages: list[Message]) -> bytes:
    """Messages as one frame."""
    body = encode(messages)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a stream of bytes back into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Take bytes as they came; returns the messages of every frame that is whole now.

        Raises:
            ValueError: the bytes are no frames of messages.
        """
        self._data += data
        out: list[Message] = []
        start = 0
        while len(self._data) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._data, start)
            if size > MAX_FRAME:
                raise ValueError(f"a frame of {size} bytes is no frame")
            end = start + _LENGTH.size + size
            if len(self._data) < end:
                break
            out += decode(bytes(self._data[start + _LENGTH.size : end]))
            start = end
        if start:
            del self._data[:start]
        return out


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
