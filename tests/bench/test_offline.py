"""What a benchmark refuses, what its records say, and sash's own figures."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.engine.conftest import save_tokenizer
from tests.families import build

from sash.bench import ceiling, memory, offline, own
from sash.bench.cases import parse_cases
from sash.bench.contest import Sash
from sash.bench.offline import OWN, Own, Plan, run
from sash.bench.record import append_record, circumstances
from sash.bench.text import topics_ids
from sash.cli.bench import _cases, _options, threads
from sash.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from sash.spec.errors import ConfigError, SashError

TINY = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 21}


def sash_whose_requests_end(reason: str, error: str | None = None) -> Sash:
    sash = object.__new__(Sash)
    answer = CompletionOutput(0, finish_reason=reason, error=error)
    out = RequestOutput("r", None, [1, 2], [answer], prompt_logprobs=None)
    sash.llm = SimpleNamespace(generate=lambda *_: [out], stream=lambda *_: iter([out]))  # type: ignore[assignment]
    return sash


def test_a_request_of_sash_that_fails_is_told_and_not_measured() -> None:
    sash = sash_whose_requests_end("error", "the step raised twice: no memory")
    calls = (
        lambda: sash.score([1, 2]),
        lambda: sash.answer([[1, 2]], 4),
        lambda: sash.answer([[1, 2], [3, 4]], 4),
    )
    for call in calls:
        with pytest.raises(SashError, match=r"ended with error .*the step raised twice: no memory"):
            call()


def test_requests_together_have_their_first_tokens_when_the_last_has_its_own() -> None:
    sash = object.__new__(Sash)
    outs = [
        RequestOutput("r", None, [1], [CompletionOutput(0, token_ids=[5])], metrics=RequestMetrics(first_token_s=s))
        for s in (25.0, 75.0, 50.0)
    ]
    sash.llm = SimpleNamespace(generate=lambda *_: outs)  # type: ignore[assignment]
    started = time.perf_counter()
    first, tokens = sash.answer([[1], [1], [1]], 1)
    assert started + 75 <= first < started + 76 and tokens == [[5]] * 3


def test_records_are_one_json_line_each(tmp_path: Path) -> None:
    file = tmp_path / "new" / "records.jsonl"
    append_record({"a": 1}, file)
    append_record({"b": [2, "é"]}, file)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [{"a": 1}, {"b": [2, "é"]}]


def test_a_record_names_the_commit_of_its_own_checkout_alone(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.touch()
    assert circumstances(file)["commit"] == "unknown"

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    (tmp_path / "theirs").touch()
    git("add", "theirs")
    git("commit", "-qm", "theirs")
    assert circumstances(file)["commit"] == "unknown"  # in the folder, not in the checkout
    git("add", "own.py")
    git("commit", "-qm", "own")
    found = circumstances(file)
    assert (found["commit"], found["changed_files"]) == (git("rev-parse", "--short=12", "HEAD").strip(), 0)
    file.write_text("1")
    assert circumstances(file)["changed_files"] == 1


def test_a_whole_run_on_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    _, folder = build("gemma3", tmp_path, max_position_embeddings=4096)
    save_tokenizer(folder)
    top = ceiling.Ceiling(1e9, {"float32": 1e12})
    monkeypatch.setattr(ceiling, "measure_apart", lambda threads: top)
    monkeypatch.setattr(offline, "measure_apart", memory.measure)
    monkeypatch.setattr(offline, "first_token_s", lambda model, options, starts: [0.5] * starts)
    monkeypatch.setitem(OWN, "short", Own((8,), (5, 5000), (20, 5000), 2))
    said: list[str] = []
    plan = Plan(str(folder), parse_cases("3,2x4"), 2, torch.get_num_threads(), TINY, "short")
    record = json.loads(json.dumps(run(plan, said.append)))
    assert [f["name"] for f in record["figures"]] == ["prefill 3", "decode after 3", "2 requests x 4"]
    assert all(f["sash"]["low"] > 0 and f["sash"]["runs"] == 2 and f["ceiling"] > 0 for f in record["figures"])
    assert {"commit", "date", "cpu", "cores", "python", "threads", "seed", "versions"} <= record.keys()
    assert 1 < record["perplexity"]["8"] < 1e6
    assert record["token_s"].keys() == {"5"} and record["token_s"]["5"] > 0
    [line] = record["memory"]
    assert line["tokens"] == 20 and line["pool_bytes"]["window"] > 0 and line["resident_bytes"] > 1 << 20
    assert record["first_token_s"] == [0.5, 0.5]
    assert len(said) == 3 + 4


def test_the_text_is_repeated_as_needed_and_its_beginning_stays() -> None:
    tokenizer = SimpleNamespace(encode=lambda text: [2, *map(ord, text)])
    ids = topics_ids(tokenizer, 200)  # type: ignore[arg-type]
    assert ids[0] == 2 and len(ids) == 200
    assert topics_ids(tokenizer, 1000)[:200] == ids  # type: ignore[arg-type]
    short = SimpleNamespace(encode=lambda text: [7, 8, 9])
    assert topics_ids(short, 8) == [7, 8, 9, 7, 8, 9, 7, 8]  # type: ignore[arg-type]


def test_starts_are_timed_until_the_first_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The command ends once the clock has been read for the second time: whoever waits for its end first waits for ever.
    read = tmp_path / "read"
    code = f"import os, time\nprint('A', flush=True)\nwhile not os.path.exists({str(read)!r}): time.sleep(0.01)"
    moments: list[float] = []

    def clock() -> float:
        moments.append(2.0 * len(moments))
        if len(moments) == 2:
            read.touch()
        return moments[-1]

    monkeypatch.setattr(own, "_MAIN", code)
    monkeypatch.setattr(own, "time", SimpleNamespace(perf_counter=clock))
    assert own.first_token_s("m", {}, starts=1) == [2.0]
    monkeypatch.setattr(own, "_MAIN", "import sys; sys.exit(f'sash: no model, only {sys.argv[1:]}')")
    with pytest.raises(SashError, match=r"sash generate failed: sash: no model, only \['generate', 'm'.*'--page-size'"):
        own.first_token_s("m", {"page_size": 32}, starts=1)


def test_engine_options_reach_the_engine_and_the_command_line() -> None:
    options = _options(["quantization=int8", "page-size=32", "deterministic=true", "seed=0"])
    assert options == {"quantization": "int8", "page_size": 32, "deterministic": True, "seed": 0}
    given = [item for name, value in options.items() for item in own._option(name, value)]
    assert given == ["--quantization", "int8", "--page-size", "32", "--deterministic", "--seed", "0"]
    for text in ("quantization", "=int8"):
        with pytest.raises(ConfigError, match=r"--engine-option must be NAME=VALUE, such as page_size=32; got"):
            _options([text])


def test_cases_and_threads_have_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [case.prompt for case in _cases("smollm2-135m", None, False)] == [512, 4096]
    assert len(_cases("gemma3-270m", None, False)) == 5
    assert [case.tokens for case in _cases("gemma3-270m", None, True)] == [576, 8 * 48]
    assert _cases("gemma3-270m", "7", True) == parse_cases("7")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "all")
    with pytest.raises(ConfigError, match=r"OMP_NUM_THREADS='all' must be a number of threads"):
        threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads() in (1, 2)
