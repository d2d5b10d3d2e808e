"""Standard streams as programs find them in the wild: closed, full, or of an encoding that lacks characters."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def standard_streams() -> Iterator[None]:
    """Run a program with all three streams there, whose output is out when it ends.

    A character that an output's encoding lacks is written as an escape. Output that can't be written
    ends the program with exit code 1: in silence where the reader is gone, with the reason where the
    disk is full.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - lives as long as the process
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE):
            raise
        if error.errno == errno.ENOSPC:
            print("sash: the output can't be written (no space left on the device): free some", file=sys.stderr)
        # What is buffered would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(1) from None


def log_to_stderr(level: int) -> None:
    """Send log lines of ``level`` and above to standard error, so that standard output is the answer's."""
    import structlog

    structlog.configure(
        processors=[_plain_line],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(level),
    )


def _plain_line(_logger: object, _method: str, event: MutableMapping[str, Any]) -> str:
    text = str(event.pop("event"))
    pairs = " ".join(f"{key}={value}" for key, value in event.items())
    return f"{text} {pairs}".rstrip()


def print_json(document: object) -> None:
    """One line of JSON on standard output; escaped where its encoding lacks characters."""
    has_all = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    print(json.dumps(document, ensure_ascii=not has_all))
