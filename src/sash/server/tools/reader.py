"""One call, read while it arrives: a JSON object with a name and arguments."""

from __future__ import annotations

import json

_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class ValueReader:
    """Reads one JSON value, character by character, to its end; strict only about brackets and strings."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._string = self._escape = self._scalar = False

    def push(self, char: str) -> bool:
        """Take a character; False when it stands behind the value, which is done then."""
        if self._string:
            self._in_string(char)
        elif char == '"':
            self._string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            if not self._depth:
                self.done = True
                return False
            self._depth -= 1
            self.done = not self._depth
        elif not self._depth:
            if char in "," + _SPACE:
                self.done = self._scalar
                return not self._scalar
            self._scalar = True
        return True

    def _in_string(self, char: str) -> None:
        if self._escape:
            self._escape = False
        elif char == "\\":
            self._escape = True
        elif char == '"':
            self._string = False
            self.done = not self._depth


class CallReader:
    """Reads ``{"name": …, "arguments": …}`` (or ``parameters``) in any order and among other keys.

    ``name`` is None until it is known; ``take`` returns what is new of the arguments. ``done``: the object has ended;
    ``broken``: it is none, or names nothing.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = self.broken = False
        self.raw: list[str] = []
        self._pending: list[str] = []
        self._text = False  # the arguments are JSON inside a JSON string
        self._key: str | None = None
        self._value: ValueReader | None = None
        self._piece: list[str] = []
        self._colon = False

    def push(self, text: str) -> int:
        """Take characters up to the object's end; returns how many were taken."""
        for i, char in enumerate(text):
            self._take(char)
            if self.done or self.broken:
                self.raw.append(text[: i + 1])
                if self.done and self.name is None:
                    self._unwrap()
                return i + 1
        self.raw.append(text)
        return len(text)

    def take(self) -> str:
        """New pieces of the arguments, once the name is known."""
        if self.name is None or (self._text and not self.done):
            return ""
        piece, self._pending = "".join(self._pending), []
        if self._text and piece:
            try:
                return str(json.loads(piece))
            except ValueError:
                return piece
        return piece

    def _take(self, char: str) -> None:
        if self._value is not None:
            if self._value.push(char):
                self._keep(char)
                if self._value.done:
                    self._end_value()
                return
            self._end_value()
        if self._key is None:
            self._between(char)
        elif not self._colon:
            self._colon = char == ":"
            self.broken = not self._colon and char not in _SPACE
        elif char not in _SPACE:
            self._value = ValueReader()
            self._text = self._text or (self._key in _ARGUMENTS and char == '"')
            self._take(char)

    def _between(self, char: str) -> None:
        """Before a key."""
        if self._piece:  # in the key's string
            self._piece.append(char)
            if char == '"' and self._piece[-2] != "\\":
                self._key, self._piece = "".join(self._piece[1:-1]), []
        elif char == '"':
            self._piece.append(char)
        elif char == "}":
            self.done = True
        elif char not in "{," + _SPACE:
            self.broken = True

    def _keep(self, char: str) -> None:
        if self._key in _ARGUMENTS:
            self._pending.append(char)
        elif self._key == "name":
            self._piece.append(char)

    def _end_value(self) -> None:
        if self._key == "name" and self.name is None:
            try:
                name = json.loads("".join(self._piece))
            except ValueError:
                name = None
            self.name = name if isinstance(name, str) else None
            self.broken = self.name is None
        self._key, self._value, self._piece, self._colon = None, None, [], False

    def _unwrap(self) -> None:
        """An object without a name may hold the call under ``function``."""
        try:
            wrapped = json.loads("".join(self.raw)).get("function")
            self.name = str(wrapped["name"])
            arguments = wrapped.get("arguments", wrapped.get("parameters", {}))
            self._text = False
            self._pending = [arguments if isinstance(arguments, str) else json.dumps(arguments)]
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            self.broken = True
