"""The core in a process of its own: ``python -m sash.engine.process FD FORM``, FD an open socket to whoever asked.
FORM is that of log lines: json, also when left out, or text.

A step of some milliseconds and a web server can't share one interpreter lock. The process loads the model and then
takes messages between steps; it ends when told to, and when the other side has gone.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sash.engine.messages import (
    Accepted,
    AddRequest,
    CancelRequest,
    Failed,
    GetReport,
    Message,
    Ready,
    Refused,
    Report,
    Start,
    Stop,
    Update,
)
from sash.engine.wire import Channel
from sash.spec.errors import RequestError, SashError
from sash.spec.log import renderer

if TYPE_CHECKING:
    from sash.engine.core import EngineCore


def main() -> int:
    """Serve one client until it stops the core or goes; the exit code is 0 then, 2 where the start was refused, and
    1 after a defect."""
    _log_to_stderr(*sys.argv[2:3])
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    # Ctrl-C and a supervisor's SIGTERM reach the whole process group: whoever is in front decides when we end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        start = channel.receive(wait=True)[0]
        if not isinstance(start, Start):
            raise TypeError(f"the first message must be Start, got {type(start).__name__}")
        core = _load(start, channel)
        _serve(core, channel)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0
    except Exception as error:
        refused = isinstance(error, SashError)
        detail = str(error) if refused else "".join(traceback.format_exception(error))
        _tell(channel, Failed(type(error).__name__, detail))
        return 2 if refused else 1
    return 0


def _tell(channel: Channel, message: Message) -> None:
    try:
        channel.send([message])
    except OSError:
        print(f"sash: {message}", file=sys.stderr)


def _load(start: Start, channel: Channel) -> EngineCore:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    from sash.engine.build import build_core
    from sash.engine.llm import engine_config

    built = build_core(start.model, engine_config(start.options))
    config = built.config
    channel.send(
        [
            Ready(
                max_model_len=config.max_model_len,
                max_num_seqs=config.options.max_num_seqs,
                dtype=config.dtype,
                quantization=config.quantization,
                pool_line=config.pool_line(),
            )
        ]
    )
    return built.core


@dataclass(slots=True)
class _Compiling:
    """A request whose grammar is being compiled; its time is over at ``due_s`` of the monotonic clock."""

    request: AddRequest
    due_s: float


def _serve(core: EngineCore, channel: Channel) -> None:
    """Messages, a step, news; over and over. All messages that have come are taken before a step is scheduled.
    Requests whose grammar is being compiled wait here, while the others' steps go on."""
    compiling: list[_Compiling] = []
    while True:
        news: list[Message] = []
        if compiling and core.grammars is not None:
            core.grammars.poll()
            # Sockets tell of what is still being compiled only: the last step may have taken the news of the rest.
            if not core.has_work and all(core.compiles(one.request) for one in compiling):
                channel.wait(core.grammars.sockets)
        for message in channel.receive(wait=not core.has_work and not compiling):
            if isinstance(message, Stop):
                return
            news += _take(core, message, compiling)
        for one in [one for one in compiling if not core.compiles(one.request)]:
            compiling.remove(one)
            news += _add(core, one.request)
        news += _expire(core, compiling)
        if core.has_work:
            news += core.step()
        if news:
            channel.send(news)


def _take(core: EngineCore, message: Message, compiling: list[_Compiling]) -> list[Message]:
    """Carry out one message; returns its answer. A request whose grammar isn't compiled goes to ``compiling``."""
    if isinstance(message, AddRequest):
        return _add(core, message, compiling)
    if isinstance(message, CancelRequest):
        core.cancel(message)
        _give_up(core, message.answer_id, compiling)
        return []
    if isinstance(message, GetReport):
        return [Report(message.number, core.report(page_maps=message.page_maps))]
    raise TypeError(f"{type(message).__name__} is no message for a core")


def _expire(core: EngineCore, compiling: list[_Compiling]) -> list[Message]:
    """Tell of requests whose time is over before their grammar is compiled."""
    news: list[Message] = []
    now = time.monotonic()
    for request in [one.request for one in compiling if now >= one.due_s]:
        _give_up(core, request.answer_ids[0], compiling)
        news.append(Accepted(request.answer_ids[0]))
        news += [Update(answer_id, finish_reason="timeout") for answer_id in request.answer_ids]
    return news


def _give_up(core: EngineCore, answer_id: str, compiling: list[_Compiling]) -> None:
    """Nobody waits for the answer: nor for its grammar, unless others do."""
    for one in [one for one in compiling if answer_id in one.request.answer_ids]:
        compiling.remove(one)
        wanted = one.request.params.structured_outputs
        others = {other.request.params.structured_outputs for other in compiling}
        if wanted is not None and core.grammars is not None and wanted not in others:
            core.grammars.forget(wanted)


def _add(core: EngineCore, request: AddRequest, compiling: list[_Compiling] | None = None) -> list[Message]:
    try:
        core.check_request(request)
        if compiling is not None and core.compiles(request):
            timeout_s = core.config.options.request_timeout_s
            compiling.append(_Compiling(request, math.inf if timeout_s is None else time.monotonic() + timeout_s))
            return []
        core.add(request)
    except RequestError as error:
        return [Refused(request.answer_ids[0], str(error))]
    return [Accepted(request.answer_ids[0])]


def _log_to_stderr(form: str = "json") -> None:
    """Log lines on standard error, which belongs to whoever started the process."""
    import structlog

    structlog.configure(
        processors=[_add_process, structlog.processors.add_log_level, renderer(form)],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )


def _add_process(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "part": "core", **event}


if __name__ == "__main__":
    sys.exit(main())
