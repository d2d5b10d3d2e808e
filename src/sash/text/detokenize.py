"""Token ids to text while they arrive: whole characters only, and nothing that may turn out to be a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from sash.text.base import Tokenizer


class IncrementalText:
    """The text of a growing answer.

    What ``push`` and ``finish`` return, joined, is ``tokenizer.decode`` of all ids, cut at the first stop string. Time
    per token doesn't grow with the text. Bytes that can't be UTF-8 become U+FFFD as soon as that is certain, an
    unfinished character only in ``finish``.

    Args:
        tokenizer: gives the bytes of each token.
        stop: strings that end the text, the one that is complete first; of several complete at once the longest.
        include_stop: keep the stop string in the text.
        skip_special: leave control tokens out.
        at_start: the ids begin a text, so a space that the tokenizer puts before every text is dropped; an answer
            continues its prompt and keeps it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        at_start: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = StopChecker(stop, include_stop)
        self._parts: list[str] = []
        self._strip = at_start and tokenizer.strips_space
        self._finished = False

    @property
    def text(self) -> str:
        """Everything returned so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return self._stop.stopped

    def push(self, ids: Iterable[int], *, check_stop: bool = True) -> str:
        """Take more tokens; returns the text that is now certain. After a stop string: nothing more.

        ``check_stop`` False passes the tokens' text on as it is: no part of it belongs to a stop string.
        """
        data = b"".join([self._tokenizer.token_bytes(i) for i in ids if i not in self._skipped])
        text = self._decode(data, final=False)
        return self._emit(self._stop.push(text) if check_stop else self._stop.skip(text))

    def finish(self) -> str:
        """No more tokens come: returns what was held back. Calling it again returns nothing."""
        if self._finished:
            return ""
        self._finished = True
        text = self._stop.push(self._decode(b"", final=True))
        return self._emit(text + self._stop.finish())

    def _decode(self, data: bytes, *, final: bool) -> str:
        text = self._utf8.decode(data, final)
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        return text

    def _emit(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text


class StopChecker:
    """Passes text on until a stop string is complete; holds back an end that may be the start of one."""

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        self._stop = [s for s in stop if s]
        self._include = include_stop
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """Text that can be shown. Costs time in proportion to ``text`` and the stop strings."""
        if self.stopped is not None or not text:
            return ""
        if not self._stop:
            return text
        text = self._held + text
        found = [(at + len(s), at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            end, start, self.stopped = min(found)
            self._held = ""
            return text[: end if self._include else start]
        keep = max(_overlap(text, s) for s in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def skip(self, text: str) -> str:
        """Text that can be shown, unsearched: what was held back, and all of ``text``."""
        return "" if self.stopped is not None else self.finish() + text

    def finish(self) -> str:
        """The text still held back, which is no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper start of ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
