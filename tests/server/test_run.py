"""``sash serve`` as a process: signals, a core that dies, certificates, and what is refused at the start."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
from tests.engine.conftest import save_tokenizer
from tests.families import build

from sash.doctor.logs import examine_log

STREAMS = 16
FLAGS = ["--dtype", "float32", "--max-model-len", "2000", "--kv-cache-memory-bytes", "64MiB", "--max-num-seqs", "16"]
LONG = {"prompt": [5, 6, 7], "max_tokens": 900, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and room for long answers."""
    _, folder = build("gemma3", tmp_path_factory.mktemp("tiny"))
    save_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return folder


class Served:
    """A server's process and its log."""

    def __init__(self, folder: Path, *flags: str, **env: str) -> None:
        command = [sys.executable, "-m", "sash", "serve", str(folder), "--port", "0", *FLAGS, *flags]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "SASH_SERVE_JOBS_DIR": "none"} | env
        self.process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
        self.lines: list[dict[str, Any]] = []
        self.raw = ""
        self._news = threading.Condition()
        assert self.process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,))
        self._reader.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            with self._news:
                self.raw += line
                if line.startswith("{"):
                    self.lines.append(json.loads(line))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def wait_for(self, event: str, count: int = 1) -> dict[str, Any]:
        """The log line of an event, once it has come so many times."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self.lines if line["event"] == event]

        with self._news:
            self._news.wait_for(lambda: len(found()) >= count or not self._reader.is_alive(), 60)
            assert len(found()) >= count, self.raw
            return found()[-1]

    def wait_for_text(self, pattern: str) -> str:
        """The first group of a pattern, once a line has it."""

        def found() -> re.Match[str] | None:
            return re.search(pattern, self.raw)

        with self._news:
            self._news.wait_for(lambda: found() or not self._reader.is_alive(), 60)
            match = found()
            assert match is not None, self.raw
            return match[1]

    @property
    def url(self) -> str:
        return str(self.wait_for("serving")["url"])

    def end(self) -> int:
        """Wait for the exit code."""
        code = self.process.wait(60)
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    def core(self) -> int:
        """The process id of the core."""
        out = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=True)
        return int(out.stdout.split()[0])


Serve = Callable[..., Served]


@pytest.fixture
def serve(folder: Path) -> Iterator[Serve]:
    made: list[Served] = []

    def make(*flags: str, **env: str) -> Served:
        made.append(Served(folder, *flags, **env))
        return made[-1]

    yield make
    for served in made:
        if served.process.poll() is None:
            served.process.kill()
        served.end()


def stream(url: str, started: threading.Semaphore, **body: object) -> tuple[int, list[dict[str, Any]], bool]:
    """Status, events and whether [DONE] came."""
    events, done = [], False
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True} | body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                events.append(json.loads(line[6:]))
                if len(events) == 1:
                    started.release()
        if answer.status_code != 200:
            started.release()
        return answer.status_code, events, done


def reason(events: list[dict[str, Any]]) -> object:
    return next((e["choices"][0]["finish_reason"] for e in reversed(events) if e.get("choices")), None)


def test_sigterm_lets_streams_finish_and_refuses_new_ones(serve: Serve) -> None:
    served = serve()
    url, started = served.url, threading.Semaphore(0)
    with ThreadPoolExecutor(STREAMS) as pool:
        running = [pool.submit(stream, url, started) for _ in range(STREAMS)]
        for _ in range(STREAMS):
            started.acquire()
        served.process.send_signal(signal.SIGTERM)
        assert served.wait_for("draining")["open_answers"] == STREAMS
        refused = httpx.post(f"{url}/v1/completions", json=LONG)
        assert refused.status_code == 503 and refused.json()["error"]["message"]
        assert httpx.get(f"{url}/ready").status_code == 503
        for status, events, done in (future.result() for future in running):
            assert (status, done, reason(events)) == (200, True, "length")
    assert served.end() == 0


def test_a_drain_that_takes_too_long_tells_those_who_wait(serve: Serve) -> None:
    served = serve("--drain-s", "0.3")
    url, started = served.url, threading.Semaphore(0)
    with ThreadPoolExecutor(5) as pool:
        running = [pool.submit(stream, url, started, max_tokens=1900) for _ in range(4)]
        for _ in range(4):
            started.acquire()
        whole = pool.submit(httpx.post, f"{url}/v1/completions", json=LONG | {"max_tokens": 1900}, timeout=60)
        while httpx.get(f"{url}/load").json()["server_load"] < 5:
            pass
        served.process.send_signal(signal.SIGINT)
        ended = [future.result() for future in running]
        refused = whole.result()
    assert all(done and (events[-1].get("error") or reason(events) == "length") for _, events, done in ended)
    errors = [events[-1]["error"] for _, events, _ in ended if "error" in events[-1]]
    assert errors and {error["code"] for error in errors} == {"draining"}
    assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
    assert refused.json()["error"]["code"] == "draining" and "send it again" in refused.json()["error"]["message"]
    assert served.end() == 0
    assert "engine_dead" not in served.raw and "engine failed" not in served.raw
    assert served.wait_for("request", 5)["error"] == "draining"


def test_a_core_that_dies_is_started_again_and_nobody_hangs(serve: Serve) -> None:
    served = serve("--max-restarts", "1")
    url, started = served.url, threading.Semaphore(0)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(stream, url, started)
        started.acquire()
        whole = pool.submit(httpx.post, f"{url}/v1/completions", json=LONG | {"max_tokens": 1900}, timeout=60)
        while httpx.get(f"{url}/health").status_code != 200:
            pass
        os.kill(served.core(), signal.SIGKILL)
        _, events, done = running.result()
        assert done and "send it again" in events[-1]["error"]["message"]
        assert whole.result().status_code == 500
    served.wait_for("engine_restarted")
    again = httpx.post(f"{url}/v1/completions", json=LONG | {"max_tokens": 5}, timeout=60)
    assert again.status_code == 200 and again.json()["usage"]["completion_tokens"] == 5
    os.kill(served.core(), signal.SIGKILL)
    assert served.end() == 1, "one restart was allowed"
    assert served.lines[-1]["exit_code"] == 1


def results(url: str, job: str) -> dict[int, str]:
    """Lines of a job's results by index."""
    lines = httpx.get(f"{url}/v1/jobs/{job}/results", params={"order": "finished"}).text.splitlines()
    out = {json.loads(line)["index"]: line for line in lines}
    assert len(out) == len(lines)
    return out


@pytest.mark.parametrize("end", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_job_goes_on_after_the_server_has_ended(serve: Serve, tmp_path: Path, end: signal.Signals) -> None:
    flags = ("--jobs-dir", str(tmp_path / "jobs"))
    served = serve(*flags)
    body = {"prompts": [[5, 6, 7]] * 30, "max_tokens": 120, "ignore_eos": True, "temperature": 0}
    job = httpx.post(f"{served.url}/v1/jobs", json=body).json()["id"]
    while not (known := results(served.url, job)):
        pass
    served.process.send_signal(end)
    assert served.end() == (0 if end == signal.SIGTERM else -end)
    assert len(known) < 30
    again = serve(*flags)
    while (status := httpx.get(f"{again.url}/v1/jobs/{job}").json())["status"] != "completed":
        assert status["status"] == "running"
    lines = results(again.url, job)
    assert sorted(lines) == list(range(30)) and known.items() <= lines.items()
    answers = [json.loads(line)["response"] for line in lines.values()]
    assert {answer["status_code"] for answer in answers} == {200}
    assert len({answer["body"]["choices"][0]["text"] for answer in answers}) == 1


def test_text_lines_are_the_cores_too_and_a_file_has_no_colours(serve: Serve, tmp_path: Path) -> None:
    served = serve("--log-format", "text", SASH_SERVE_API_KEY="one")
    url = served.wait_for_text(r"\] serving .*url=(\S+)")
    assert httpx.post(f"{url}/v1/completions", json=LONG).status_code == 401
    served.process.send_signal(signal.SIGTERM)
    assert served.end() == 0
    assert not served.lines and "\x1b" not in served.raw
    assert re.search(r"^20\S+ \[info     \] .*kernels.* part=core$", served.raw, re.MULTILINE)
    log = tmp_path / "log"
    log.write_text(served.raw)
    told = {finding.name: finding.evidence for finding in examine_log(log)}
    assert told["rejected"].startswith("1 × 401") and told["length-limited"] == "max_model_len 2000"
    assert "kernels" in told["kernels"]


def test_keys_and_certificates(serve: Serve, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-out", str(cert), "-keyout", str(key)),
        ],
        check=True,
        capture_output=True,
    )
    served = serve("--tls-cert", str(cert), "--tls-key", str(key), SASH_SERVE_API_KEY="one,two")
    assert served.url.startswith("https://")
    with httpx.Client(verify=ssl.create_default_context(cafile=str(cert)), base_url=served.url) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers={"Authorization": "Bearer two"}).status_code == 200
    served.process.send_signal(signal.SIGTERM)
    assert served.end() == 0
    assert "one,two" not in served.raw and "Bearer" not in served.raw


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--page-size", "0"], "page_size must be at least 1"),
        (["--port", "70000"], "port must be 0 to 65535"),
        (["--host", "no.such.host.invalid"], "is no address of this machine"),
        (["--host", "a" * 300], "is no address of this machine"),
        (["--tls-cert", "/nowhere"], "tls_cert and tls_key go together"),
        (["--jobs-dir", ""], "--jobs-dir is empty: name a path"),
        (["--jobs-dir", "/dev/null/jobs"], "jobs_dir: .* can't be written .*--jobs-dir"),
    ],
)
def test_what_can_not_work_ends_with_2_and_a_reason(serve: Serve, flags: list[str], message: str) -> None:
    served = serve(*flags)
    assert served.end() == 2
    assert re.search(message, served.raw) and "Traceback" not in served.raw


def test_a_broken_template_is_refused(serve: Serve, tmp_path: Path) -> None:
    template = tmp_path / "broken.jinja"
    template.write_text("{% for message in messages %}{{ message")
    served = serve("--chat-template", str(template))
    assert served.end() == 2 and "is not valid jinja" in served.raw and str(template) in served.raw


def test_a_taken_port_is_refused(serve: Serve) -> None:
    port = serve().url.rsplit(":", 1)[1]
    second = serve("--port", port)
    assert second.end() == 2 and "use another --port" in second.raw
