"""Checks of a log that sash wrote: lines of ``sash serve`` as JSON or text, or the plain ones of other commands."""

from __future__ import annotations

import ast
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sash.doctor.finding import Finding, Status, ok, skipped
from sash.spec.errors import ConfigError

FAILURES, REJECTED, SLOW, SPLIT, LENGTH, KERNELS, LATENCY = (
    "failures",
    "rejected",
    "slow-requests",
    "pool-split",
    "length-limited",
    "kernels",
    "latency",
)
# 2026-11-30 03:47:13 [info     ] native kernels: avx512
# 2026-11-30T03:47:13+0000 [info     ] serving                        model=tiny url='http://…'
_PLAIN = re.compile(r"^(?P<time>\d\S*[ T]\S+) \[(?P<level>\w+) *\] (?P<event>.*)$")
_NAME = re.compile(r"\s+(\w+)=")
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\[[^\]]*\]|[^\s'\"\[]*")
_LITERAL = re.compile(r"['\"].*|None|True|False|[-+.\de]*\d[-+.\de]*")
_POOLS = re.compile(r"full_layer_tokens=(\d+), swa_layer_tokens=\[?(\d+)")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_FAILED = (
    "request_failed",
    "generation_failed",
    "stream_failed",
    "response_failed",
    "job_failed",
    "job_request_failed",
)
_ENGINE = ("engine_ended", "giving_up", "restart_failed", "restart_refused", "core_failed", "step_failed")
_REASONS = {
    400: ("requests that can't be run", "the client's errors; their answers name the field"),
    401: ("requests without a known key", "send Authorization: Bearer KEY"),
    404: ("requests for another model", "--served-model-name with the name that clients use"),
    408: ("bodies that came too slowly", "look at the network"),
    409: ("what clashes with what is there", "the client's errors: an Idempotency-Key that came with another body"),
    413: ("bodies that are too large", "--max-body-bytes with more"),
    422: ("requests that can't be run", "the client's errors; their answers name the field"),
    429: ("requests while too much waited", "--max-waiting with more, or another replica"),
    500: ("requests that failed inside", "see failures"),
    503: (
        "requests while the server didn't take any",
        "wait for /ready; keep the server up longer than its balancer asks",
    ),
    507: ("jobs for which there was no room", "a larger disk for --jobs-dir, or jobs_max_bytes with more"),
    504: ("requests that took too long", "--request-timeout-s with more, or shorter answers"),
}
# Those are the clients' own affair: told, not held against the server.
_CLIENTS = (400, 401, 404, 405, 409, 413, 415, 422)
_SLOW_S = 30.0
# Status of a request whose client left before there was an answer.
_GONE = 499


@dataclass
class Log:
    """What a log holds: its lines as fields, and how many could not be read."""

    events: list[Mapping[str, Any]] = field(default_factory=list)
    unread: int = 0

    def of(self, *names: str) -> list[Mapping[str, Any]]:
        """Lines of these events."""
        return [e for e in self.events if e.get("event") in names]

    def saying(self, text: str) -> list[str]:
        """Events that contain a text."""
        return [str(e["event"]) for e in self.events if text in str(e.get("event", ""))]


def read_log(path: Path) -> Log:
    """Read a log's lines.

    Raises:
        ConfigError: it can't be read, or holds no line of sash.
    """
    log = Log()
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.strip():
                    _add(log, _COLOURS.sub("", line.strip()))
    except OSError as error:
        raise ConfigError(
            f"--log {path} can't be read ({error.strerror}); name a file that sash serve wrote"
        ) from error
    if not log.events:
        raise ConfigError(f"--log {path} holds no line that sash wrote ({log.unread} others); name its log file")
    return log


def _add(log: Log, line: str) -> None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and "event" in value:
        log.events.append(value)
    elif found := _PLAIN.match(line):
        event, values = _fields(found["event"])
        log.events.append({"time": found["time"], "level": found["level"], **values, "event": event})
    else:
        log.unread += 1


def _fields(text: str) -> tuple[str, dict[str, Any]]:
    """The event that a plain line begins with, and the ``name=value`` that stand behind it up to its end."""
    for first in _NAME.finditer(text):
        values: dict[str, Any] = {}
        name: re.Match[str] | None = first
        end = first.start()
        while name is not None:
            value = _QUOTED.match(text, name.end())
            assert value is not None  # it may be empty
            values[name[1]], end = _value(value[0]), value.end()
            name = _NAME.match(text, end)
        if not text[end:].strip():
            return text[: first.start()], values
    return text.strip(), {}


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text) if _LITERAL.fullmatch(text) else text
    except (ValueError, SyntaxError):
        return text


def examine_log(path: Path) -> list[Finding]:
    """Everything that a log tells.

    Raises:
        ConfigError: it is none.
    """
    log = read_log(path)
    return [
        _length(log),
        _split(log),
        _kernels(log),
        _rejected(log),
        _failures(log),
        *_durations(log),
    ]


def _length(log: Log) -> Finding:
    shortened = [line for line in log.saying("shortened from") if line.startswith("max_model_len")]
    if shortened:
        return Finding(
            LENGTH,
            Status.WARN,
            shortened[-1],
            "the KV budget is too small for the context that is usual for this model",
            "--kv-cache-memory-bytes with more, or --max-model-len with what you need",
        )
    serving = log.of("serving")
    told = f"max_model_len {serving[-1]['max_model_len']}" if serving and "max_model_len" in serving[-1] else "not told"
    return ok(LENGTH, told)


def _split(log: Log) -> Finding:
    lines = [found for line in log.saying("Use ") if (found := _POOLS.search(line))]
    if not lines:
        return skipped(SPLIT, "the log has no line of two pools")
    full, window = map(int, lines[-1].groups())
    return ok(SPLIT, f"full_layer_tokens={full}, swa_layer_tokens={window}: ratio {window / max(full, 1):.3f}")


def _kernels(log: Log) -> Finding:
    missing = [line for line in log.saying("kernels") if "not built" in line]
    if missing:
        return Finding(
            KERNELS,
            Status.WARN,
            missing[-1],
            "the C++ kernels don't run",
            "install a C++ compiler, then pip install --force-reinstall --no-deps sash-llm",
        )
    told = log.saying("kernels")
    return ok(KERNELS, told[-1]) if told else skipped(KERNELS, "the log has no line of kernels")


def _rejected(log: Log) -> Finding:
    statuses = Counter(int(e["status"]) for e in _asked(log) if _number(e.get("status")))
    bad = {status: count for status, count in sorted(statuses.items()) if status >= 400 and status != _GONE}
    ignored = sorted({str(e) for e in log.saying(" is ignored")})
    told = [f"{count} × {status} ({_reason(status)[0]})" for status, count in bad.items()]
    if not statuses and not ignored:
        return skipped(REJECTED, "the log has no requests")
    seen = "; ".join([*told, *ignored]) or f"none of {sum(statuses.values())} requests was refused, no option ignored"
    held = [status for status in bad if status not in _CLIENTS]
    if not held and not ignored:
        return ok(REJECTED, seen)
    if held:
        worst = max(held, key=lambda s: bad[s])
        what, fix = _reason(worst)
        return Finding(REJECTED, Status.WARN, seen, f"the server refused {what}", fix)
    return Finding(REJECTED, Status.WARN, seen, "an option has no effect here", "leave it out")


def _reason(status: int) -> tuple[str, str]:
    """What was refused with a status, and what to do."""
    return _REASONS.get(status, (f"requests with status {status}", "look at their lines in the log"))


def _failures(log: Log) -> Finding:
    engine, requests = log.of(*_ENGINE), log.of(*_FAILED)
    if not engine and not requests:
        return ok(FAILURES, f"none in {len(log.events)} lines" + (f" ({log.unread} are not sash's)" * bool(log.unread)))
    first = (engine or requests)[0]
    reason = _last_line(first.get("error") or first.get("reason") or first["event"])
    counts = Counter(str(e["event"]) for e in (*engine, *requests))
    return Finding(
        FAILURES,
        Status.FAIL,
        f"{', '.join(f'{count} × {name}' for name, count in counts.items())}; the first at {first.get('time', '?')}: "
        f"{reason}",
        _cause_of(reason),
        _fix_of(reason),
    )


def _last_line(text: object) -> str:
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return (lines[-1] if lines else "no reason given")[:300]


def _cause_of(reason: str) -> str:
    lowered = reason.lower()
    if "memory" in lowered or "killed" in lowered or "signal 9" in lowered or "-9" in lowered:
        return "the machine ran out of memory, and the system ended the engine"
    if "pages" in lowered:
        return "a pool ran out of pages"
    return "a step or a request raised an error"


def _fix_of(reason: str) -> str:
    if "memory" in _cause_of(reason):
        return "a smaller --kv-cache-memory-bytes, --kv-cache-dtype int8, or a machine with more memory"
    return "sash doctor MODEL checks the engine that raised it"


def _durations(log: Log) -> list[Finding]:
    timed = [e for e in _asked(log) if _number(e.get("duration_s")) and e.get("status") in (200, _GONE)]
    times = sorted(float(e["duration_s"]) for e in timed if e["status"] == 200)
    if not timed:
        return [skipped(LATENCY, "the log has no answers"), skipped(SLOW, "the log has no answers")]
    latency, limit = skipped(LATENCY, "the log has no answers that were waited for"), _SLOW_S
    if times:
        half, most = times[len(times) // 2], times[int(0.95 * (len(times) - 1))]
        latency = ok(LATENCY, f"{len(times)} answers: half took {half:.2f} s, one in twenty {most:.2f} s or more")
        limit = max(_SLOW_S, 10 * half)
    slow = [e for e in timed if float(e["duration_s"]) > limit]
    if not slow:
        return [latency, ok(SLOW, f"none took more than {limit:.0f} s")]
    gone = sum(e["status"] == _GONE or bool(e.get("client_gone")) for e in slow)
    worst = max(slow, key=lambda e: float(e["duration_s"]))
    told = ", ".join(f"{k} {worst[k]}" for k in ("prompt_tokens", "completion_tokens", "answers") if k in worst)
    return [
        latency,
        Finding(
            SLOW,
            Status.WARN,
            f"{len(slow)} answers took more than {limit:.0f} s, request {worst.get('request_id')} "
            f"{float(worst['duration_s']):.0f} s{f' ({told})' if told else ''}"
            f"{f'; the clients of {gone} left before the end' if gone else ''}",
            "long answers, long prompts, or waiting behind them",
            "sash doctor --url URL --symptom slow tells who waits and for what; bound answers with max_tokens",
        ),
    ]


def _asked(log: Log) -> list[Mapping[str, Any]]:
    """Lines of requests for tokens; others, such as a balancer's, may be refused by design."""
    return [e for e in log.of("request") if str(e.get("path", "")).startswith("/v1/") and e.get("method") == "POST"]


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def events(lines: Iterable[str]) -> Log:
    """A log from its lines."""
    log = Log()
    for line in lines:
        _add(log, line)
    return log
