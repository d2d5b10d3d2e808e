"""What a benchmark refuses, what its lines and records say, and the ceilings that it holds figures against."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engine.conftest import save_tokenizer
from tests.equivalence.harness import tiny_spec
from tests.families import build

from sash.bench import ceiling, offline
from sash.bench.contest import Sash, Timing
from sash.bench.offline import Figure, Plan, run
from sash.bench.record import append_record, circumstances
from sash.cli.bench import _sizes
from sash.engine.outputs import CompletionOutput, RequestOutput
from sash.spec.errors import ConfigError, SashError
from sash.spec.span import Span

PLAN = Plan("no-such-model", "bfloat16", "none", lengths=(16,), repeats=1, memory=())


class Fake:
    """An engine with one opinion."""

    name, version = "fake", "1"

    def __init__(self, likelihood: float | Exception) -> None:
        self.likelihood = likelihood

    def run(self, prompt: Sequence[int], new_tokens: int) -> Timing:
        return Timing(1.0, 1.0, tuple(range(new_tokens)))

    def negative_log_likelihood(self, tokens: Sequence[int]) -> float:
        if isinstance(self.likelihood, Exception):
            raise self.likelihood
        return self.likelihood


def sash_whose_requests_end(reason: str, error: str | None = None) -> Sash:
    sash = object.__new__(Sash)
    answer = CompletionOutput(0, finish_reason=reason, error=error)
    out = RequestOutput("r", None, [1, 2], [answer], prompt_logprobs=None)
    sash.llm = SimpleNamespace(generate=lambda *_: [out], stream=lambda *_: iter([out]))  # type: ignore[assignment]
    return sash


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, dtype="auto"), "--dtype 'auto' is unknown; use float32, bfloat16"),
        (replace(PLAN, against="vapour"), "--against 'vapour' is unknown; use transformers or none"),
    ],
)
def test_what_cannot_be_compared_is_refused_first(plan: Plan, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(plan)


def test_engines_that_agree_pass_the_gate() -> None:
    gate: Any = offline._gate
    assert gate(Fake(2.0), None, [1]) == {"sash": math.exp(2.0)}
    assert gate(Fake(2.0), Fake(2.004), [1]) == {"sash": math.exp(2.0), "fake": math.exp(2.004)}


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (2.0, 2.006, "nothing is timed unless they are numbers that agree"),
        (2.006, 2.0, "nothing is timed"),
        (2.0, math.nan, "nothing is timed"),
        (math.nan, None, "nothing is timed"),
        (2.0, RuntimeError("no such kernel"), r"fake can't run the model \(no such kernel\): use --against none"),
    ],
)
def test_the_gate_refuses_engines_that_disagree(ours: float, theirs: Any, message: str) -> None:
    gate: Any = offline._gate
    with pytest.raises(ConfigError, match=message):
        gate(Fake(ours), None if theirs is None else Fake(theirs), [1])


def test_a_request_of_sash_that_fails_is_told_and_not_measured() -> None:
    sash = sash_whose_requests_end("error", "the step raised twice: no memory")
    calls = (
        lambda: offline._gate(sash, None, [1, 2]),
        lambda: sash.run([1, 2], 4),
        lambda: sash.run_batch([[1, 2]], 4),
    )
    for call in calls:
        with pytest.raises(SashError, match=r"ended with error .*the step raised twice: no memory"):
            call()


def test_agreement_counts_tokens_before_the_first_difference() -> None:
    def agreement(a: tuple[int, ...], b: tuple[int, ...]) -> str:
        return offline._agreement({"a": [Timing(1, 1, a), Timing(1, 1, b)], "b": [Timing(1, 1, b)]})

    assert agreement((5, 6, 7), (5, 6, 7)) == "3 of 3"
    assert agreement((5, 6, 7), (5, 9, 7)) == "1 of 3"
    assert agreement((5, 6), (6, 6)) == "0 of 2"


def test_a_line_says_the_ratio_and_the_share_of_the_ceiling() -> None:
    assert offline._line(Figure("prefill 512", 300.0)).split() == ["prefill", "512", "300.0", "tok/s"]
    line = offline._line(Figure("decode", 30.0, 20.0, 40.0, {"greedy_tokens_equal": "3 of 4", "ratio_to_one": 2.256}))
    assert "peer     20.0 ratio  1.50" in line
    assert "ceiling     40.0 (75 %)" in line
    assert line.endswith("greedy_tokens_equal 3 of 4  ratio_to_one 2.26")


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


def test_a_window_bounds_what_decode_reads_and_prefill_multiplies() -> None:
    spec = tiny_spec([Span.sliding(4), Span.full()])
    # Hidden 16, 4 heads over 2 of size 8, MLP 24: q and o 512 each, k and v 256 each, the MLP 1152.
    assert ceiling.weight_elements(spec) == (2 * 2688, 61 * 16)
    # 6352 weights of two bytes; of K and V the window sees 4 rows and the full layer 10, each of 32 numbers.
    assert ceiling.decode_bytes(spec, 9, "bfloat16") == 12_704 + 896
    # 9 rows of 5376 weights; 30 pairs in the window and 45 in the full layer, 64 products each; one row of the head.
    assert ceiling.prefill_flop(spec, 9) == 2 * (48_384 + 4_800 + 976)


def test_sizes_are_numbers_between_commas() -> None:
    assert _sizes("--lengths", "512, 16384,") == (512, 16384)
    assert _sizes("--memory", "") == ()
    for text in ("0", "-4", "12;13", "1e3", "many"):
        with pytest.raises(ConfigError, match=r"--lengths must be numbers of 1 or more, .* such as 512,16384; got"):
            _sizes("--lengths", text)


def test_a_whole_run_on_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = build("gemma3", tmp_path, max_position_embeddings=4096)
    save_tokenizer(folder)
    monkeypatch.setattr(ceiling, "measure", lambda dtype: ceiling.Ceiling(1e9, 1e12))
    said: list[str] = []
    plan = Plan(str(folder), "float32", "none", (1, 2), repeats=1, memory=(), new_tokens=3, batch=2, batch_tokens=4)
    record = json.loads(json.dumps(run(plan, said.append)))
    names = ["prefill 1", "decode after 1", "prefill 2", "decode after 2", "decode, 2 requests"]
    assert [f["name"] for f in record["figures"]] == names
    assert all(f["sash"] > 0 and f["peer"] is None for f in record["figures"])
    assert said[0].startswith("perplexity of 512 tokens: ") and len(said) == 1 + len(names)
    assert record["perplexity_512"].keys() == {"sash"} and 1 < record["perplexity_512"]["sash"] < 1e6
    assert {"commit", "date", "cpu", "cores", "python", "threads", "seed", "versions", "dtype"} <= record.keys()
    assert record["seed"] is None and record["memory"] == []
