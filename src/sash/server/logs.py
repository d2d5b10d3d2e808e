"""Log lines of the server's process on standard error, uvicorn's among them."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import MutableMapping
from typing import Any

import structlog

from sash.spec.log import renderer

_HALF = 8000  # characters of each end of a long text that are kept


def configure_logs(form: str) -> None:
    """Send everything through structlog. ``form``: json, or text for people."""
    shared: list[Any] = [structlog.stdlib.add_log_level, _stamp]
    last = renderer(form)
    structlog.configure(
        processors=[structlog.processors.add_log_level, _stamp, structlog.processors.format_exc_info, _cut, last],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                _cut,
                last,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)


def _cut(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Long texts (an error may quote what a request made) without their middle."""
    for key, value in event.items():
        if isinstance(value, str) and len(value) > 2 * _HALF:
            event[key] = f"{value[:_HALF]} … {len(value) - 2 * _HALF} characters … {value[-_HALF:]}"
    return event


def _stamp(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "part": "server", **event}
