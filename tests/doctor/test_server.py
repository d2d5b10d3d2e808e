"""A running server: sash's own around a real core on a tiny model, and one that is not sash."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tests.engine.conftest import OPTIONS, save_tokenizer
from tests.families import build
from tests.server.live import served

from sash.doctor import server
from sash.doctor.client import Client, Reply, ServerError
from sash.doctor.finding import Finding, Status, ok
from sash.doctor.server import examine_server
from sash.doctor.statistics import grown_finding, stats_findings, work_findings
from sash.engine.async_engine import AsyncEngine
from sash.spec.errors import ConfigError
from sash.spec.load import load_spec
from sash.spec.locate import locate
from sash.text.load import load_tokenizer

ENGINE = OPTIONS | {"max_model_len": 256, "kv_cache_memory_bytes": 1 << 23}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    _, path = build("gemma3", tmp_path_factory.mktemp("tiny"))
    save_tokenizer(path)
    source = locate(path)
    engine = AsyncEngine(str(path), ENGINE, load_spec(source), load_tokenizer(source.path), max_waiting=8)
    with served(engine, start=engine.start, stop=engine.close) as url:
        yield url


@pytest.fixture(scope="module")
def found(address: str) -> dict[str, Finding]:
    return {f.name: f for f in examine_server(Client(f"{address}/v1"))}


@pytest.fixture(scope="module")
def stats(address: str, found: dict[str, Finding]) -> dict[str, Any]:
    body: dict[str, Any] = Client(address).call("/stats").body
    return body


def test_a_healthy_server(found: dict[str, Finding]) -> None:
    assert {f.name: f.evidence for f in found.values() if f.status in (Status.WARN, Status.FAIL)} == {}
    # A random model repeats no fact.
    assert [f.name for f in found.values() if f.status is Status.SKIPPED] == ["recall"]
    assert "window 2 of at most 2 pages" in found["cache-bounded"].evidence
    assert "all came back" in found["cache-bounded"].evidence


def test_times_are_of_one_period(stats: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = copy.deepcopy(stats)
    asked["uptime_s"], asked["engine"]["busy_s"] = 1000.0, 30.0
    core = next(p for p in asked["machine"]["processes"] if p["process"] == "core")
    core |= {"cpu_s": 40.0, "cpu_ratio": 0.98}
    monkeypatch.setattr(server, "_stats", lambda _: asked)
    monkeypatch.setattr(server, "_watched", lambda *_: ok("probe", ""))
    monkeypatch.setattr(server, "_outside", lambda *_: ([], []))
    monkeypatch.setattr(server.Speaker, "of", lambda *_: None)
    monkeypatch.setattr(Client, "call", lambda *_: Reply(200, {}))
    time = next(f for f in examine_server(Client("http://sash")) if f.name == "time")
    assert "steps take 3% of the time" in time.evidence and "core 4% of a processor" in time.evidence


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {f.name: f for f in findings if f.status in (Status.WARN, Status.FAIL)}


def test_what_statistics_tell(stats: dict[str, Any]) -> None:
    assert by_name([*stats_findings(stats), *work_findings(stats)]) == {}
    bad = copy.deepcopy(stats)
    engine = bad["engine"]
    engine |= {"preemptions": 3, "waiting": 5, "waiting_for": {"pages": 5}, "failed_steps": 2}
    window, full = engine["pools"]
    window |= {"longest_pages": 64, "num_pages": 64}
    full |= {"num_pages": 64, "free_pages": 0, "peak_pages": 64}
    bad["requests"]["rejected"]["overloaded"] = 4
    told = by_name([*stats_findings(bad), *work_findings(bad)])
    assert told.keys() == {"window-used", "queue", "preemptions", "rejected", "failures"}
    assert "3 answers" in told["preemptions"].evidence and "4 overloaded" in told["rejected"].evidence
    assert "store 64 pages" in told["window-used"].evidence and "2 failed steps" in told["failures"].evidence
    assert "pool is short" in told["queue"].cause
    engine["waiting_for"] = {"seats": 5}
    assert "all seats" in by_name(stats_findings(bad))["queue"].cause


def test_a_split_that_wastes(stats: dict[str, Any]) -> None:
    bad = copy.deepcopy(stats)
    window, full = bad["engine"]["pools"]
    window["num_pages"], full["num_pages"] = 900, 64
    assert "full pool is short" in by_name(stats_findings(bad))["pool-split"].cause


def test_pages_that_grow_or_stay(stats: dict[str, Any]) -> None:
    look = copy.deepcopy(stats)
    look["engine"]["pools"][0]["requests"] = {"a": 40}
    assert "40 pages" in grown_finding(stats, [look], stats).evidence
    look["engine"]["pools"][0]["requests"] = {"a": 3}
    assert grown_finding(stats, [look], stats).status is Status.OK
    after = copy.deepcopy(stats)
    after["engine"]["pools"][1]["held_pages"] = 2
    assert "full 2 pages are still held" in grown_finding(stats, [look], after).evidence
    assert grown_finding(stats, [], stats).status is Status.SKIPPED


class Other(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that is not sash. ``mixes``: its scores depend on who else is there."""

    mixes = False
    here = 0
    most = 0

    def log_message(self, *_: object) -> None: ...

    def _send(self, body: object, status: int = 200) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        pages = {
            "/v1/models": {"data": [{"id": "other", "max_model_len": 300}]},
            "/metrics": '# HELP\nvllm:kv_cache_usage_perc{engine="0"} 0.25\n',
        }
        self._send(pages.get(self.path, {}), 200 if self.path in pages else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words = body["prompt"].split()
        text = " 7 4 1 9" if len(words) < 60 else " 0 0 0 0"
        usage = {"prompt_tokens": len(words), "completion_tokens": 2}
        if body.get("stream"):
            events = [{"choices": [{"text": piece}]} for piece in ("a", "b", "c")] + [{"choices": [], "usage": usage}]
            self._send("".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n")
            return
        alone = body["prompt"].startswith("Once") and not type(self).most
        type(self).most += body["prompt"].startswith("Once")
        score = -1.0 if alone or not self.mixes else -7.0
        self._send({"choices": [{"text": text, "logprobs": {"token_logprobs": [score]}}], "usage": usage})


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Other, "most", 0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Other)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_another_server_is_seen_from_outside(other: str) -> None:
    found = {f.name: f for f in examine_server(Client(other))}
    assert {f.status for f in found.values()} == {Status.OK}
    assert found.keys() == {"alive", "latency", "recall", "batch-isolated", "memory-line"}
    assert "not sash" in found["alive"].evidence and "kv_cache_usage_perc = 0.25" in found["memory-line"].evidence
    assert "116 tokens back: not found" in found["recall"].evidence


def test_another_server_that_mixes_requests(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Other, "mixes", True)
    found = {f.name: f for f in examine_server(Client(other))}["batch-isolated"]
    assert found.status is Status.FAIL and "6.00 apart" in found.evidence


def test_what_is_no_server() -> None:
    with pytest.raises(ServerError, match="can't be reached"):
        examine_server(Client("http://127.0.0.1:9"))
    with pytest.raises(ConfigError, match="must begin with http"):
        Client("127.0.0.1:8000")


@pytest.mark.parametrize("models", ["text", [1], {"data": None}, {"data": {"a": 1}}, {"data": ["x"]}, {"data": [{}]}])
def test_models_in_no_known_form(other: str, monkeypatch: pytest.MonkeyPatch, models: object) -> None:
    monkeypatch.setattr(Other, "do_GET", lambda self: self._send(models))
    with pytest.raises(ServerError, match="no OpenAI-compatible server"):
        examine_server(Client(other))


@pytest.mark.parametrize("stats", [{}, {"state": "ready", "engine": {}, "model": {"names": []}}])
def test_statistics_of_another_version(other: str, monkeypatch: pytest.MonkeyPatch, stats: dict[str, Any]) -> None:
    monkeypatch.setattr(Other, "do_GET", lambda self: self._send({"versions": {"sash": "1"}, **stats}))
    with pytest.raises(ServerError, match="tells less than this version"):
        examine_server(Client(other))


@pytest.mark.parametrize("body", [{"choices": ["x"]}, {"choices": {"a": 1}}, {"choices": [None]}, [1]])
def test_answers_in_no_known_form(other: str, monkeypatch: pytest.MonkeyPatch, body: object) -> None:
    monkeypatch.setattr(Other, "do_POST", lambda self: self._send(body))
    with pytest.raises(ServerError, match="/v1/completions answered 200"):
        examine_server(Client(other))


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"error": {"message": "engine died"}}, "broke off: engine died"),
        ({"choices": 5}, "streamed nothing"),
        ({"choices": ["a"], "usage": 7}, "streamed nothing"),
        ("[" * 100_000, "broke off"),
    ],
)
def test_streams_in_no_known_form(other: str, monkeypatch: pytest.MonkeyPatch, event: object, message: str) -> None:
    text = event if isinstance(event, str) else json.dumps(event)
    monkeypatch.setattr(Other, "do_POST", lambda self: self._send(f"data: {text}\n\ndata: [DONE]\n\n"))
    with pytest.raises(ServerError, match=message):
        Client(other).stream("/v1/completions", {"prompt": "a"})


@pytest.mark.parametrize(
    "more", [{"usage": [1]}, {"usage": {"prompt_tokens": "many"}}, {"choices": [{"text": 5, "logprobs": "none"}]}]
)
def test_fields_of_another_kind_are_as_if_left_out(
    other: str, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    body = {"choices": [{"text": "x", "logprobs": {"token_logprobs": 5}}], **more}

    def answer(self: Other) -> None:
        streams = json.loads(self.rfile.read(int(self.headers["Content-Length"]))).get("stream")
        self._send(f"data: {json.dumps(body)}\n\n" if streams else body)

    monkeypatch.setattr(Other, "do_POST", answer)
    found = {f.name: f for f in examine_server(Client(other))}
    assert "no log-probabilities" in found["batch-isolated"].evidence
