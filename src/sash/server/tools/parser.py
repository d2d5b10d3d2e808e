"""An answer with tool calls, taken apart while it arrives."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sash.server.tools.formats import ToolFormat
from sash.server.tools.reader import CallReader, ValueReader

_NAMED = re.compile(r"\s*([A-Za-z0-9_.:-]+)\s*(\[ARGS\]|(?=\{))")
_MAYBE_NAMED = re.compile(r"\s*[A-Za-z0-9_.:-]*\s*(\[(A(R(G(S)?)?)?)?)?")
_BETWEEN = " \t\r\n,;[]"
# A longer block of Python calls is no call.
_MOST_PYTHON = 20_000


@dataclass(frozen=True, slots=True)
class CallPiece:
    """The new part of call ``index``; its first piece has the name."""

    index: int
    name: str | None
    arguments: str


Piece = str | CallPiece


class ToolParser:
    """Text and calls of one answer. Calls are told as soon as their name is known, arguments as they come; a call that
    ends without any has ``{}``.

    What only looks like a call is text: an object without a name, and where nothing but an object or a fence marks a
    call, one whose name no tool has.

    Args:
        form: how the model writes calls.
        names: of the tools.
        dropped: control tokens' texts that are no part of an answer.
        forced: the answer must be calls, so what begins is one.
    """

    def __init__(
        self, form: ToolFormat, names: Collection[str], dropped: Collection[str] = (), *, forced: bool = False
    ) -> None:
        self._form = form
        self._names = names
        self._dropped = dropped
        self._forced = forced
        self._marks = tuple(sorted({*form.opens, *dropped}, key=len, reverse=True))
        self._held = ""  # not yet taken apart
        self._opened = ""  # the mark that this call began with, and what stood behind it
        self._state = self._start if form.bare else self._text
        self._reader = CallReader()
        self._value: ValueReader | None = None
        self._told = False  # whether the name of the call under way is told
        self._empty = False  # whether it has no arguments yet
        self._trim = False  # white space behind a call is no text
        self.count = 0

    def push(self, text: str) -> list[Piece]:
        """What is certain after more text."""
        self._held += text
        return list(self._run())

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """No more text comes: the rest. ``cut``: it would have gone on, so a call under way stays as it is, and what
        began like a mark or a call is left out."""
        pieces = [] if cut else list(self._run(final=True))
        if self._told and not cut:
            pieces += self._end_call()
        elif self._told:
            self.count += 1
        elif cut and not self._maybe_text():
            pass
        elif self._opened or self._reader.raw or self._held:
            pieces.append(self._opened + "".join(self._reader.raw) + self._held)
        self._opened = self._held = ""
        self._told, self._empty, self._reader = False, False, CallReader()
        return [piece for piece in pieces if piece]

    def _run(self, final: bool = False) -> Iterator[Piece]:
        """Step through states until one of them needs more text."""
        while True:
            before = (self._state, len(self._held))
            for piece in self._state(final):
                if piece:
                    yield piece
            if (self._state, len(self._held)) == before:
                return

    # ------------------------------------------------------------------------ states

    def _start(self, final: bool) -> Iterator[Piece]:
        """At the answer's start, where a bare object is a call."""
        text = self._held.lstrip()
        if not text:
            return
        self._opened = ""
        self._state = self._text
        if text[0] == "{":
            self._opened = self._held[: len(self._held) - len(text)]
            self._held = text
            self._state = self._object
        yield ""

    def _text(self, final: bool) -> Iterator[Piece]:
        if self._trim:
            self._held = self._held.lstrip()
            self._trim = not self._held
        found = [(at, mark) for mark in self._marks if (at := self._held.find(mark)) >= 0]
        if found:
            at, mark = min(found, key=lambda item: item[0])
            text, self._held = self._held[:at], self._held[at + len(mark) :]
            if mark not in self._dropped:
                self._opened, self._state = mark, self._calls
            yield text
            return
        keep = 0 if final else max((_overlap(self._held, mark) for mark in self._marks), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        yield text

    def _calls(self, final: bool) -> Iterator[Piece]:
        """Behind a mark, or behind a call: the next call, or the end."""
        marks = (*self._form.closes, *self._marks)
        skipped, text = _split_separators(self._held, marks, final)
        self._opened += skipped if self._opened else ""
        self._held = text
        mark = next((mark for mark in marks if text.startswith(mark)), None)
        if mark is not None:
            yield from self._pass(mark)
        elif not text or (not final and any(mark.startswith(text) for mark in marks)):
            return
        elif text[0] == "{":
            self._state = self._object
        elif not self._opened:
            self._state = self._text
        elif self._form.python and self._opened.startswith("```"):
            yield from self._python(final)
        elif not self._form.named:
            yield self._no_call()
        elif final or not _MAYBE_NAMED.fullmatch(text):
            yield from self._named()

    def _pass(self, mark: str) -> Iterator[Piece]:
        """Step over a mark. One that was opened before, and no call since, was text."""
        self._held = self._held[len(mark) :]
        if mark in self._form.opens:
            opened, self._opened = self._opened, mark
            yield opened
        elif mark in self._form.closes and self._opened:
            self._opened += mark
            yield self._no_call()
        elif mark in self._form.closes:
            self._state = self._text

    def _named(self) -> Iterator[Piece]:
        found = _NAMED.match(self._held)
        if found is None:
            yield self._no_call()
            return
        self._held = self._held[found.end() :].lstrip()
        self._value, self._state, self._told, self._empty = ValueReader(), self._arguments, True, True
        yield CallPiece(self.count, found[1], "")

    def _arguments(self, final: bool) -> Iterator[Piece]:
        """The arguments of a call whose name stands before them."""
        assert self._value is not None
        taken = 0
        for char in self._held:
            if not self._value.push(char):
                break
            taken += 1
            if self._value.done:
                break
        piece, self._held = self._held[:taken], self._held[taken:]
        if piece:
            yield self._more(piece)
        if self._value.done:
            yield from self._end_call()

    def _object(self, final: bool) -> Iterator[Piece]:
        reader = self._reader
        taken = reader.push(self._held)
        self._held = self._held[taken:]
        if reader.name is not None and not self._told:
            if not self._believed(reader.name):
                yield self._no_call()
                return
            self._told = True
            piece = reader.take()
            self._empty = not piece
            yield CallPiece(self.count, reader.name, piece)
        elif self._told:
            piece = reader.take()
            if piece:
                yield self._more(piece)
        if reader.done or reader.broken:
            if self._told:
                yield from self._end_call()
            else:
                yield self._no_call()

    def _python(self, final: bool) -> Iterator[Piece]:
        """Calls as Python, up to the fence's end."""
        body, fence, rest = self._held.partition("```")
        if not fence and not final and len(body) < _MOST_PYTHON:
            return
        calls = _python_calls(body)
        if not calls or not all(name in self._names for name, _ in calls):
            yield self._no_call()
            return
        self._held, self._opened, self._state, self._trim = rest, "", self._text, True
        for name, arguments in calls:
            yield CallPiece(self.count, name, arguments)
            self.count += 1

    # ------------------------------------------------------------------------- ends

    def _believed(self, name: str) -> bool:
        """Whether an object with this name is a call: a mark of its own says so, or a tool's name."""
        marked = self._opened.strip() and not self._opened.startswith("```")
        return bool(marked) or name in self._names

    def _maybe_text(self) -> bool:
        """Whether what an answer that is cut has begun may as well be text: an object without a mark, a block of
        JSON."""
        if self._forced or self._state == self._text:
            return False
        return self._opened.startswith("```json") or not (self._opened.strip() or self.count)

    def _more(self, arguments: str) -> CallPiece:
        self._empty = False
        return CallPiece(self.count, None, arguments)

    def _end_call(self) -> list[CallPiece]:
        """The call is whole; returns the arguments of one that has said none."""
        rest = [self._more("{}")] if self._empty else []
        self.count += 1
        self._opened, self._told, self._reader = "", False, CallReader()
        self._state, self._trim = self._calls, True
        return rest

    def _no_call(self) -> str:
        """What looked like a call is text."""
        text = self._opened + "".join(self._reader.raw)
        self._opened, self._reader, self._state, self._trim = "", CallReader(), self._text, False
        return text


def _split_separators(text: str, marks: Collection[str], final: bool) -> tuple[str, str]:
    """What stands between calls, and the rest; a mark, or what may become one, isn't taken for brackets."""
    end = 0
    while end < len(text) and text[end] in _BETWEEN:
        rest = text[end:]
        if any(rest.startswith(mark) or (not final and mark.startswith(rest)) for mark in marks):
            break
        end += 1
    return text[:end], text[end:]


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that is a proper start of ``mark``."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


def _python_calls(text: str) -> list[tuple[str, str]]:
    """Calls with literal keyword arguments, maybe inside print, as (name, JSON of the arguments); none where it is
    anything else."""
    try:
        lines = ast.parse(text.strip()).body
        return [_python_call(line) for line in lines]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _python_call(line: ast.stmt) -> tuple[str, str]:
    call = line.value if isinstance(line, ast.Expr) else None
    if (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "print"
        and len(call.args) == 1
    ):
        call = call.args[0]
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    return ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)
