"""The comparison with scripted workers: who may be timed, in which turn, and what happens to those that fail."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.engine.conftest import save_tokenizer
from tests.families import build

from sash.bench import ceiling
from sash.bench.cases import Case, Timing, parse_cases
from sash.bench.peers.catalogue import PEERS, Peer, chosen
from sash.bench.peers.compare import Contest, Launch, Plan, run
from sash.bench.peers.process import PeerError, Worker
from sash.spec.errors import ConfigError, SashError

FAKE = Path(__file__).parent / "fake_worker.py"
EXACT, ROUGH = Peer("exact", "", "folder", ()), Peer("rough", "", "gguf", (), tolerance=0.03)
TEXT = list(range(3, 100))


def launcher(folder: Path, **moods: str) -> Launch:
    def launch(peer: Peer | None) -> tuple[Worker, str]:
        name = peer.name if peer else "sash"
        if moods.get(name) == "no-environment":
            raise PeerError(f"{name}: can't be installed: no such package")
        return Worker(name, [sys.executable, str(FAKE), moods.get(name, "well"), str(folder / f"{name}.log")]), "model"

    return launch


def contest(folder: Path, repeats: int = 2, patience_s: float = 60.0, **moods: str) -> Contest:
    cases = (Case(4, 3),)
    plan = Plan("m", (EXACT, ROUGH), cases, repeats, options={"page_size": 8}, patience_s=patience_s)
    return Contest(plan, launcher(folder, **moods), lambda text: None)


def finish(contest: Contest) -> dict[str, list[Timing]]:
    try:
        contest.open()
        contest.gate(TEXT)
        return contest.time(Case(4, 3), TEXT)
    finally:
        contest.close()


def order(folder: Path, do: str) -> list[str]:
    lines = [line.split() for line in (folder / "order").read_text().splitlines()]
    return [name for name, done in lines if done == do]


def test_sash_runs_before_every_run_of_a_peer(tmp_path: Path) -> None:
    runs = finish(contest(tmp_path))
    assert order(tmp_path, "run") == ["sash", "exact", "sash", "rough"] * 2
    assert runs == {"sash": [Timing(0.5, 2.0)] * 4, "exact": [Timing(1.0, 2.0)] * 2, "rough": [Timing(1.0, 2.0)] * 2}


def test_the_same_prompts_go_to_all_and_options_to_sash_alone(tmp_path: Path) -> None:
    finish(contest(tmp_path))
    requests = [json.loads((tmp_path / f"{name}.log").read_text()) for name in ("sash", "exact", "rough")]
    assert requests == [{"do": "run", "prompts": [[3, 4, 5, 6]], "new_tokens": 3}] * 3
    loading = contest(tmp_path)
    loading.open()
    loading.close()
    loads = [json.loads((tmp_path / f"{name}.log").read_text()) for name in ("sash", "exact")]
    assert [load["options"] for load in loads] == [{"page_size": 8}, {}]
    assert loads[1] == loads[0] | {"options": {}}
    assert (loads[0]["threads"], loads[0]["requests"], loads[0]["context"]) == (2, 1, 1040)


@pytest.mark.parametrize(
    ("mood", "reason"),
    [
        ("no-environment", "exact: can't be installed: no such package"),
        ("fails-load", "exact: load failed: ValueError: no load today"),
        ("dies-load", "exact: ended during load: out of memory"),
        ("fails-score", "exact: score failed: ValueError: no score today"),
        ("other-model", "perplexity 20.086 against sash's 7.389, further apart than 1 %: it isn't timed"),
        ("no-number", "perplexity nan against sash's 7.389, further apart than 1 %: it isn't timed"),
        ("fails-run", "decode after 4: exact: run failed: ValueError: no run today"),
        ("dies-run", "decode after 4: exact: ended during run: out of memory"),
    ],
)
def test_a_peer_that_fails_is_absent_with_the_reason_and_the_others_go_on(
    tmp_path: Path, mood: str, reason: str
) -> None:
    failing = contest(tmp_path, exact=mood)
    runs = finish(failing)
    assert failing.absent == {"exact": reason}
    assert failing.present == ("rough",)
    assert (len(runs["rough"]), runs.get("exact", [])) == (2, [])


def test_runs_before_a_peer_died_still_count(tmp_path: Path) -> None:
    assert len(finish(contest(tmp_path, repeats=3, exact="dies-second-run"))["exact"]) == 1


def test_a_slow_peer_is_not_repeated(tmp_path: Path) -> None:
    runs = finish(contest(tmp_path, repeats=3, patience_s=-1.0))
    assert {name: len(timings) for name, timings in runs.items()} == {"sash": 1}
    runs = finish(contest(tmp_path, repeats=3, patience_s=1e-9))
    assert {name: len(timings) for name, timings in runs.items()} == {"sash": 2, "exact": 1, "rough": 1}


def test_without_peers_sash_runs_alone(tmp_path: Path) -> None:
    runs = finish(contest(tmp_path, repeats=3, exact="fails-load", rough="fails-score"))
    assert {name: len(timings) for name, timings in runs.items()} == {"sash": 3}


@pytest.mark.parametrize("mood", ["fails-load", "dies-score", "no-number", "fails-run"])
def test_nothing_is_compared_with_a_sash_that_fails(tmp_path: Path, mood: str) -> None:
    failing = contest(tmp_path, sash=mood)
    with pytest.raises(SashError, match=r"sash"):
        finish(failing)
    assert all(worker._process.poll() is not None for worker in failing._workers.values())


def test_a_whole_comparison_gives_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = build("gemma3", tmp_path, max_position_embeddings=4096)
    save_tokenizer(folder)
    monkeypatch.setattr(ceiling, "measure_apart", lambda threads: ceiling.Ceiling(1e9, {"bfloat16": 1e12}))
    said: list[str] = []
    plan = Plan(str(folder), (EXACT, ROUGH), parse_cases("8,2x4"), 1)
    record: dict[str, Any] = run(plan, tmp_path, said.append, launcher(tmp_path, rough="other-model"))
    assert json.loads(json.dumps(record)) == record
    assert [figure["name"] for figure in record["figures"]] == ["prefill 8", "decode after 8", "2 requests x 4"]
    prefill, decode, batch = record["figures"]
    assert (prefill["ratio"], prefill["best_peer"]) == (2.0, "exact")
    assert prefill["sash"] == {"median": 16.0, "low": 16.0, "high": 16.0, "runs": 1}
    assert (decode["sash"]["median"], decode["ratio"]) == (31.5, 1.0)
    assert (batch["sash"]["median"], batch["ratio"]) == (3.2, pytest.approx(1.2))
    assert all(figure["ceiling"] > 0 for figure in record["figures"])
    assert record["absent"].keys() == {"rough"} and record["engines"].keys() == {"sash", "exact", "rough"}
    assert math.isclose(record["perplexity"]["exact"], math.exp(2.0))
    assert {"commit", "date", "cpu", "cores", "python", "threads", "seed"} <= record.keys()
    assert any("ratio 2.00 to exact" in line for line in said)


def test_peers_are_chosen_by_name() -> None:
    assert [peer.name for peer in chosen("vllm, llama.cpp")] == ["vllm", "llama.cpp"]
    assert chosen("none") == []
    with pytest.raises(ConfigError, match=r"--peers 'mlx' is unknown; use llama.cpp, openvino, vllm, transformers, or"):
        chosen("vllm,mlx")


def test_every_peer_is_pinned_and_has_its_adapter() -> None:
    workers = Path(sys.modules["sash.bench.peers.catalogue"].__file__ or "").parent / "workers"
    for peer in PEERS.values():
        assert (workers / f"{peer.adapter}.py").is_file()
        assert all("==" in requirement for requirement in peer.requirements)
