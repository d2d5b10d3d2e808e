"""The loop inside a worker, and sash as one."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engine.conftest import save_tokenizer
from tests.families import build

from sash.bench.peers.process import Worker
from sash.bench.peers.workers import worker
from sash.bench.peers.workers.adapter_sash import Engine
from sash.bench.peers.workers.worker import Service, serve


class Scripted:
    """Answers every prompt with its first token, again and again."""

    version, settings = "7", {"threads": 2}

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.asked: list[tuple[list[list[int]], int]] = []

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        self.asked.append((prompts, new_tokens))
        first = time.perf_counter()
        return first, [[prompt[0]] * (new_tokens if prompt[0] else 1) for prompt in prompts]

    def score(self, tokens: list[int]) -> list[float]:
        raise MemoryError("no room")


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setattr(worker.importlib, "import_module", lambda name: SimpleNamespace(Engine=Scripted))
    return Service("adapter_scripted")


def ask(service: Service, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    answers = io.StringIO()
    serve(service, io.StringIO("".join(json.dumps(request) + "\n" for request in requests)), answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_requests_are_answered_line_by_line(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    run = {"do": "run", "prompts": [list(range(5, 45)), list(range(6, 46))], "new_tokens": 3}
    loaded, ran, scored, again = ask(service, {"do": "load", "model": "m"}, run, {"do": "score", "tokens": [1]}, run)
    assert loaded == {"ok": {"version": "7", "settings": {"threads": 2}}}
    assert ran["ok"]["tokens"] == [[5, 5, 5], [6, 6, 6]]
    assert ran["ok"]["prefill_s"] >= 0 and ran["ok"]["decode_s"] >= 0
    assert scored == {"error": "MemoryError: no room"} and "no room" in capsys.readouterr().err
    assert "ok" in again
    engine: Any = service._engine
    assert engine.arguments == {"model": "m"}
    # A short run of as many prompts goes before each.
    assert engine.asked[0] == ([list(range(5, 21)), list(range(6, 22))], 4)


def test_answers_of_another_length_are_an_error(service: Service) -> None:
    _, ran = ask(service, {"do": "load"}, {"do": "run", "prompts": [[0, 1]], "new_tokens": 3})
    assert ran["error"].startswith("RuntimeError: wanted 3 tokens for each of 1 prompts")


def test_what_an_engine_prints_does_not_reach_the_answers(tmp_path: Path) -> None:
    (tmp_path / "adapter_loud.py").write_text(
        "import os\n"
        "class Engine:\n"
        "    version, settings = '1', {}\n"
        "    def __init__(self): print('hello'); os.write(1, b'from C')\n"
    )
    script = tmp_path / "worker.py"
    script.write_text(Path(worker.__file__ or "").read_text())
    loud = Worker("loud", [sys.executable, str(script), "adapter_loud"])
    try:
        assert loud.ask("load", 30) == {"version": "1", "settings": {}}
    finally:
        loud.close()


def test_sash_is_an_engine_like_the_others(tmp_path: Path) -> None:
    _, folder = build("gemma3", tmp_path)
    save_tokenizer(folder)
    import torch

    engine = Engine(str(folder), torch.get_num_threads(), 64, 2, {"dtype": "float32", "kv_cache_memory_bytes": 1 << 21})
    assert engine.settings["precision"] == {"weight_bytes": 4, "kv": ["float32", "float32"], "gemm": "float32"}
    prompts = [[3, 4, 5, 6], [7, 8, 9, 3]]
    started = time.perf_counter()
    first, together = engine.run(prompts, 5)
    assert started < first < time.perf_counter()
    assert [len(answer) for answer in together] == [5, 5]
    assert [engine.run([prompt], 5)[1][0] for prompt in prompts] == together
    assert len(engine.score(prompts[0])) == 3 and min(engine.score(prompts[0])) > 0
