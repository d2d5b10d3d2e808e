"""Where a prompt comes from: an argument, a file or standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from sash.spec.errors import RequestError


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt. One newline at the end of a file or of standard input is the editor's, not the prompt's.

    Raises:
        RequestError: none given, two given, empty, unreadable or not UTF-8.
    """
    if argument is not None and file is not None:
        raise RequestError("a prompt is given as argument and by --file: drop one of them")
    if argument is not None:
        text = _argument(argument)
    elif file is not None:
        text = _decode(_read(file), str(file))
    elif sys.stdin.isatty():
        raise RequestError('no prompt: give one as argument ("The capital of France is"), with --file, or pipe it in')
    else:
        text = _decode(sys.stdin.buffer.read(), "standard input")
    if not text:
        raise RequestError('the prompt is empty: give at least one character, for example "The capital of France is"')
    return text


def _argument(argument: str) -> str:
    try:
        argument.encode()
    except UnicodeEncodeError as error:
        # The shell's bytes reach Python as lone surrogates where they are not UTF-8.
        raise RequestError(
            f"the prompt is not valid UTF-8 at character {error.start}: type it anew or use --file"
        ) from error
    return argument


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise RequestError(f"--file {file} can't be read: {error.strerror}; name a text file") from error


def _decode(data: bytes, where: str) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{where} is not valid UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}; "
            f"convert it first, for example with iconv -f latin1 -t utf-8"
        ) from error
    return text.removesuffix("\n").removesuffix("\r")
