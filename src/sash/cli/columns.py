"""Tables as plain text, for commands that must answer at once: rich takes 50 ms to load and to lay a page out."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence

_LEAST = 10
_GAP = "  "


class Page:
    """Lines on standard output. A terminal gets bold and folded cells; a pipe or a file gets whole lines, so that they
    can be searched."""

    def __init__(self) -> None:
        terminal = sys.stdout.isatty()
        self._styled = terminal and not os.environ.get("NO_COLOR")
        self._width = shutil.get_terminal_size().columns if terminal else None

    def styled(self, text: str, code: str = "1") -> str:
        """``text`` in bold, or by another code of ANSI's."""
        return f"\x1b[{code}m{text}\x1b[0m" if self._styled else text

    def say(self, text: str, indent: str = "") -> None:
        """A paragraph; further lines of it are indented."""
        print("\n".join(_folded(text, self._width, indent)))

    def table(
        self, title: str, headings: Sequence[str], rows: Sequence[Sequence[object]], *, total: bool = False
    ) -> None:
        """Columns of numbers stand to the right. The last row of a ``total`` stands below a line."""
        cells = [[str(cell) for cell in row] for row in rows]
        right = [i > 0 and all(row[i][:1].isdigit() for row in cells) for i in range(len(headings))]
        widths = self._widths([headings, *cells])
        rule = "─" * (sum(widths) + len(_GAP) * (len(widths) - 1))
        print()
        if title:
            print(self.styled(title))
        if any(headings):
            for line in _lines(headings, widths, right):
                print(self.styled(line))
            print(rule)
        for number, row in enumerate(cells):
            if total and number == len(cells) - 1:
                print(rule)
            for line in _lines(row, widths, right):
                print(line)

    def _widths(self, rows: Sequence[Sequence[str]]) -> list[int]:
        """Of each column; where the terminal is narrower, the widest give way."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        room = (self._width or sys.maxsize) - len(_GAP) * (len(widths) - 1)
        while sum(widths) > room and max(widths) > _LEAST:
            widths[widths.index(max(widths))] -= 1
        return widths


def _lines(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> Iterator[str]:
    """A row, on as many lines as its longest cell needs."""
    folded = [_folded(cell, width) for cell, width in zip(row, widths, strict=True)]
    for number in range(max(map(len, folded))):
        parts = [cell[number] if number < len(cell) else "" for cell in folded]
        aligned = zip(parts, widths, right, strict=True)
        yield _GAP.join(text.rjust(width) if last else text.ljust(width) for text, width, last in aligned).rstrip()


def _folded(text: str, width: int | None, indent: str = "") -> list[str]:
    """``text`` broken between words; codes of ANSI's count as letters, so a styled line may be short."""
    if width is None or len(text) <= width:
        return [text]
    import textwrap

    return textwrap.wrap(text, max(width, _LEAST), subsequent_indent=indent) or [""]
