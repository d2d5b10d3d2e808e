"""Servers and generators as processes, with scripts in their place."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from sash.bench.peers.environment import Workshop
from sash.bench.peers.process import PeerError
from sash.bench.serving import llama, servers
from sash.bench.serving.client import Address
from sash.bench.serving.generators import LocustRun, Shape, VllmBench, locust_figures, run_locust
from sash.bench.serving.llama import llama_server
from sash.bench.serving.sampling import row_of
from sash.bench.serving.servers import (
    Launch,
    Server,
    Setting,
    free_address,
    llama_launch,
    null_launch,
    sash_launch,
    vllm_launch,
)
from sash.spec.locate import ModelSource

LISTENER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def listener(code: str = LISTENER, ready: str = "/ready") -> Launch:
    address = free_address()
    return Launch("a server", (sys.executable, "-c", code, str(address.port)), address, ready)


def setting(kind: str = "gguf") -> Setting:
    return Setting(ModelSource(kind, Path("/m/a.gguf"), "a"), "a", Path("/tok"), 640, 8, 2)  # type: ignore[arg-type]


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_server_sleeps_wakes_and_ends(tmp_path: Path) -> None:
    server = Server(listener(), tmp_path / "logs" / "log", 30)
    server.sleep()
    deadline = time.monotonic() + 10
    while state(server.pid) != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state(server.pid) == "T"
    server.wake()
    server.close()
    server.close()
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


@pytest.mark.parametrize(
    ("launch", "told"),
    [
        (listener("import sys; print('no such model'); sys.exit(3)"), "ended with 3: no such model"),
        (listener(ready="/never"), "not ready after 1 s"),
        (Launch("a server", ("/no/such/program",), Address("127.0.0.1", 1)), "can't start /no/such/program"),
    ],
)
def test_a_server_that_does_not_come_up_says_why(tmp_path: Path, launch: Launch, told: str) -> None:
    with pytest.raises(PeerError, match=told):
        Server(launch, tmp_path / "log", 1 if "ready" in told else 30)


def test_what_each_server_is_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = " ".join(sash_launch(setting(), "--api-key", "k").command)
    assert (
        "serve a --port" in own
        and "--max-num-seqs 8 --max-model-len 640 --threads 2 --jobs-dir none --api-key k" in own
    )
    llama_command = " ".join(llama_launch(setting(), Path("/bin/llama-server")).command)
    assert "--model /m/a.gguf" in llama_command and "--parallel 8 --ctx-size 5120" in llama_command
    with pytest.raises(PeerError, match="reads GGUF files"):
        llama_launch(setting("folder"), Path("/bin/llama-server"))
    assert null_launch(Path("r.json")).command[-3:-1] == ("r.json", "--port")
    monkeypatch.setattr(Workshop, "python", lambda self, peer: Path("/env/python"))
    monkeypatch.setattr(Workshop, "model", lambda self, peer, source: Path("/folder"))
    launch = vllm_launch(setting(), Workshop(tmp_path))
    text = " ".join(launch.command)
    assert text.startswith(f"/env/python {servers.VLLM} serve /folder") and "--no-enable-prefix-caching" in text
    assert "--tokenizer /tok" in text and "VLLM_ENABLE_V1_MULTIPROCESSING" not in launch.env


BENCH = """#!{python}
import json, pathlib, sys
def after(name): return sys.argv[sys.argv.index(name) + 1]
{do}
count = int(after("--num-prompts"))
result = {{"completed": count, "failed": {failed}, "duration": 2.0}}
result |= {{"total_input_tokens": 50, "total_output_tokens": 40}}
result |= {{"request_throughput": count / 2, "output_throughput": 20.0}}
result |= {{f"p{{p}}_{{m}}_ms": float(p) for p in (50, 90, 99) for m in ("ttft", "tpot", "itl", "e2el")}}
pathlib.Path(after("--result-dir"), after("--result-filename")).write_text(json.dumps(result))
"""


def bench(folder: Path, do: str = "", failed: int = 0) -> VllmBench:
    python = folder / "python"
    python.write_text(BENCH.format(python=sys.executable, do=do, failed=failed))
    python.chmod(0o755)
    return VllmBench(python, Path("/tok"), folder)


def test_figures_of_vllm_bench_serve(tmp_path: Path) -> None:
    found = bench(tmp_path).run(Address("127.0.0.1", 5), "a", Shape(4, 16, 10, 2), seed=3)
    assert (found["requests"], found["output_rate"], found["request_rate"]) == (4, 20.0, 2.0)
    assert found["ttft_ms"] == {"p50": 50.0, "p90": 90.0, "p99": 99.0}


def test_a_generator_that_fails_says_why(tmp_path: Path) -> None:
    address, shape = Address("127.0.0.1", 5), Shape(4, 16, 10, 2)
    with pytest.raises(PeerError, match="ValueError: no server"):
        bench(tmp_path, "raise ValueError('no server')").run(address, "a", shape, 1)
    with pytest.raises(PeerError, match="2 requests failed"):
        bench(tmp_path, failed=2).run(address, "a", shape, 1)
    assert bench(tmp_path, failed=2).run(address, "a", shape, 1, lenient=True)["failed"] == 2


def test_open_and_closed_loops_are_told_apart(tmp_path: Path) -> None:
    made = bench(tmp_path)
    closed = made.command(Address("h", 5), "a", Shape(4, 16, 10, 2), 1, "r.json")
    opened = made.command(Address("h", 5), "a", Shape(4, 16, 10, rate=3.0), 1, "r.json")
    assert closed[closed.index("--max-concurrency") + 1] == "2" and "inf" in closed
    assert "--max-concurrency" not in opened and opened[opened.index("--request-rate") + 1] == "3.0"
    assert (LocustRun(4, 10).mode, LocustRun(1, 10, rate=2.0).mode) == ("closed", "open")


STATS = """Type,Name,Request Count,Failure Count,Requests/s,50%,90%,99%
SSE,first,7,1,3.5,12,20,30
,Aggregated,7,1,3.5,12,20,30
"""


def test_figures_of_locust(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text(STATS)
    assert locust_figures(tmp_path / "s.csv") == {
        "first": {"count": 7, "failures": 1, "rate": 3.5, "ms": {"p50": 12.0, "p90": 20.0, "p99": 30.0}}
    }
    assert locust_figures(tmp_path / "none.csv") == {}
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport sys\nprint('no host')\nsys.exit(1)\n")
    script.chmod(0o755)
    with pytest.raises(PeerError, match="locust failed: no host"):
        run_locust(script, Path("f.py"), Address("h", 5), "a", LocustRun(1, 1), tmp_path)


def test_llama_server_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    place = tmp_path / f"llama-server-{llama.VERSION}"

    def run(command: list[str], failed: str, timeout_s: float) -> None:
        commands.append(command)
        if "--build" in command:
            (place / "build" / "bin").mkdir(parents=True)
            (place / "build" / "bin" / "llama-server").write_text("binary")
        if "download" in command:
            import tarfile

            with tarfile.open(place / f"llama_cpp_python-{llama.VERSION}.tar.gz", "w:gz") as tar:
                tar.add(__file__, f"llama_cpp_python-{llama.VERSION}/vendor/llama.cpp/CMakeLists.txt")

    monkeypatch.setattr(llama, "run", run)
    monkeypatch.setattr(llama.shutil, "which", lambda name: "/usr/bin/cmake")
    said: list[str] = []
    binary = llama_server(tmp_path, said.append)
    assert binary.read_text() == "binary" and [path.name for path in place.iterdir()] == ["llama-server"]
    assert len(commands) == 3 and len(said) == 1
    assert llama_server(tmp_path, said.append) == binary and len(commands) == 3
    monkeypatch.setattr(llama.shutil, "which", lambda name: None)
    with pytest.raises(PeerError, match="cmake is not installed"):
        llama_server(tmp_path / "other", said.append)


def test_a_sample_keeps_pools_and_queues() -> None:
    pool = {"name": "full", "num_pages": 8, "held_pages": 3, "cached_pages": 1, "free_pages": 4, "page_bytes": 9}
    assert row_of({"engine": {"running": 2, "waiting": 5, "pools": [pool]}}, 1.23456) == {
        "at_s": 1.235,
        "running": 2,
        "waiting": 5,
        "pools": {"full": {"total": 8, "held": 3, "cached": 1}},
    }
