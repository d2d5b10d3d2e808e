from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sash.doctor.finding import Finding, Status
from sash.doctor.logs import events, examine_log
from sash.spec.errors import ConfigError
from sash.spec.log import renderer

START = [
    {"event": "dtype bfloat16: cpu has bfloat16 arithmetic", "part": "core", "level": "info"},
    {"event": "native kernels: avx512", "part": "core", "level": "info"},
    {"event": "Use sliding window memory pool. full_layer_tokens=1000, swa_layer_tokens=16 (window 1 MiB)"},
    {"event": "serving", "max_model_len": 512, "model": "tiny", "level": "info"},
]


def request(status: int = 200, duration_s: float = 0.5, **more: Any) -> dict[str, Any]:
    line = {"event": "request", "request_id": "a", "method": "POST", "path": "/v1/completions"}
    return line | {"status": status, "duration_s": duration_s} | more


def found(tmp_path: Path, *lines: object) -> dict[str, Finding]:
    path = tmp_path / "log"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return {f.name: f for f in examine_log(path)}


def test_healthy(tmp_path: Path) -> None:
    result = found(tmp_path, *START, *[request()] * 20, request(404), "Traceback of somebody else")
    assert [f.name for f in result.values() if f.status is not Status.OK] == []
    assert "ratio 0.016" in result["pool-split"].evidence
    assert "native kernels: avx512" in result["kernels"].evidence
    assert "half took 0.50 s" in result["latency"].evidence
    assert "1 are not sash's" in result["failures"].evidence


def test_what_was_refused(tmp_path: Path) -> None:
    ignored = {"event": "swa_full_tokens_ratio is ignored: every layer has a window"}
    result = found(tmp_path, ignored, request(), *[request(429)] * 3, request(503))["rejected"]
    assert result.status is Status.WARN and "3 × 429" in result.evidence and "is ignored" in result.evidence
    assert "--max-waiting" in result.fix
    assert found(tmp_path, ignored)["rejected"].cause == "an option has no effect here"


def test_a_balancer_that_asks_is_no_client(tmp_path: Path) -> None:
    line = request(503, path="/ready", method="GET")
    assert found(tmp_path, request(), line)["rejected"].status is Status.OK


def test_failures_and_their_causes(tmp_path: Path) -> None:
    ended = {"event": "engine_ended", "reason": "the core's process ended with exit code -9", "time": "noon"}
    result = found(tmp_path, *START, ended)["failures"]
    assert result.status is Status.FAIL and "1 × engine_ended" in result.evidence and "noon" in result.evidence
    assert "out of memory" in result.cause and "--kv-cache-dtype int8" in result.fix
    raised = {"event": "request_failed", "error": "Traceback\n  line 1\nValueError: odd\n"}
    result = found(tmp_path, raised)["failures"]
    assert "ValueError: odd" in result.evidence and "Traceback" not in result.evidence
    assert result.cause == "a step or a request raised an error"


def test_slow_requests(tmp_path: Path) -> None:
    slow = request(duration_s=99.0, request_id="slug", prompt_tokens=9, completion_tokens=800)
    result = found(tmp_path, *[request()] * 20, slow)["slow-requests"]
    assert result.status is Status.WARN and "slug 99 s (prompt_tokens 9, completion_tokens 800)" in result.evidence


def test_those_who_left_waited_too(tmp_path: Path) -> None:
    result = found(tmp_path, *[request()] * 3, request(499, 60.0, client_gone=True, request_id="left"))
    assert result["rejected"].status is Status.OK and "3 answers" in result["latency"].evidence
    slow = result["slow-requests"]
    assert slow.status is Status.WARN and "request left 60 s; the clients of 1 left before the end" in slow.evidence
    alone = found(tmp_path, request(499, 60.0))
    assert alone["latency"].status is Status.SKIPPED and alone["slow-requests"].status is Status.WARN
    assert found(tmp_path, request(499, 2.0))["slow-requests"].status is Status.OK


def test_every_status_that_is_answered_says_what_was_refused(tmp_path: Path) -> None:
    clash = found(tmp_path, request(409), request())["rejected"]
    assert clash.status is Status.OK and "1 × 409 (what clashes" in clash.evidence
    assert found(tmp_path, request(507))["rejected"].cause == "the server refused jobs for which there was no room"
    assert found(tmp_path, request(418))["rejected"].cause == "the server refused requests with status 418"


def test_start_lines(tmp_path: Path) -> None:
    plain = (
        "2026-11-30 03:47:13 [info     ] max_model_len 96: shortened from 32768 so that one request fits the pools\n"
        "2026-11-30 03:47:13 [info     ] torch kernels: the C++ kernels are not built (no module)"
    )
    result = found(tmp_path, plain)
    assert result["length-limited"].status is result["kernels"].status is Status.WARN
    assert result["latency"].status is result["slow-requests"].status is Status.SKIPPED


def test_lines_as_text_tell_the_same(tmp_path: Path) -> None:
    """As structlog writes them: the event, padded, then fields by name; values with spaces in quotes."""
    write = renderer("text")
    lines = [
        *START,
        *[request()] * 20,
        *[request(429)] * 3,
        request(401),
        request(duration_s=99.0, request_id="slug", prompt_tokens=9),
        {"event": "request_failed", "level": "error", "error": 'Traceback\n  it\'s\nValueError: "odd" a=b\n'},
        {"event": "jobs_turn_failed", "level": "error", "param": None, "origins": ["a b", "c=d"]},
    ]
    lines = [{"time": "2026-11-30T03:47:13+0000", "part": "core", "level": "info", **line} for line in lines]
    text = [write(None, "", dict(line)) for line in lines]
    assert not any(line.startswith("{") or "\x1b" in line for line in text)
    assert found(tmp_path, *text) == found(tmp_path, *lines)
    assert events(text).events[-1]["param"] is None and events(text).events[-2]["error"] == lines[-2]["error"]


def test_a_log_without_requests_says_nothing_of_them(tmp_path: Path) -> None:
    assert found(tmp_path, *START)["rejected"].status is Status.SKIPPED


def test_numbers_that_are_none_and_lines_too_deep(tmp_path: Path) -> None:
    odd = [
        "[" * 100_000,
        '{"event": "serving"}',
        *(f'{json.dumps(request())[:-1]}, "status": {n}}}' for n in ("NaN", "1e999")),
    ]
    result = found(tmp_path, *odd, request(duration_s=float("inf")), request())
    assert "1 answers" in result["latency"].evidence and "1 are not sash's" in result["failures"].evidence


def test_what_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no line that sash wrote \\(2 others\\)"):
        found(tmp_path, "hello", '{"a": 1}')
    with pytest.raises(ConfigError, match="can't be read"):
        examine_log(tmp_path / "none")
