"""Log lines as data, on standard error unless the program has configured structlog its own way."""

from __future__ import annotations

import sys
from typing import Any


def logger() -> Any:
    """The logger to use now: the program's, or a plain one on standard error.

    structlog's own default is standard output, which belongs to the program that uses sash.
    """
    import structlog

    if structlog.is_configured():
        return structlog.get_logger()
    return structlog.wrap_logger(structlog.PrintLogger(sys.stderr))


def renderer(form: str) -> Any:
    """The last processor of lines that go to standard error: ``form`` json, or text for people, in colours on a
    terminal."""
    import structlog

    if form == "json":
        return structlog.processors.JSONRenderer()
    return structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), timestamp_key="time", exception_formatter=structlog.dev.plain_traceback
    )
