from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from tests.cli.scripted import Run
from tests.cli.test_inspect import CONFIG

import sash.doctor.engine
import sash.doctor.server
import sash.doctor.transformers_model
from sash.doctor.finding import Finding, Status, ok
from sash.spec.config import EngineConfig

BAD = Finding("mask-edge", Status.FAIL, "distance 8 is seen", "off by one", "mend it")


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_a_config_needs_no_weights(run: Run, config: str) -> None:
    outcome = run("doctor", config, "--dtype", "float32")
    assert outcome.code == 0 and outcome.out.endswith("checks, nothing wrong.\n")
    assert "hybrid" in outcome.out and "FAIL" not in outcome.out


def test_what_is_wrong_ends_with_one(run: Run, config: str) -> None:
    outcome = run("doctor", config, "--dtype", "float32", "--disable-hybrid-swa-memory", "--json")
    document = json.loads(outcome.out)
    assert outcome.code == document["exit_code"] == 1
    assert [f["name"] for f in document["findings"] if f["status"] == "warn"] == ["window-used"]
    assert document["subject"] == config


def test_a_symptom_that_can_t_be_looked_for_here_is_not_well(run: Run, config: str) -> None:
    outcome = run("doctor", config, "--dtype", "float32", "--symptom", "batch")
    assert outcome.code == 0  # pool-split is told
    log = Path(config).with_name("serve.log")
    log.write_text('{"event": "serving", "level": "info"}\n')
    outcome = run("doctor", "--log", str(log), "--symptom", "myths")
    assert outcome.code == 2 and outcome.out.endswith("Nothing could be looked at here.\n")


def test_a_symptom_asks_its_checks_alone(run: Run, config: str) -> None:
    outcome = run("doctor", config, "--dtype", "float32", "--symptom", "kv-grows", "--json")
    names = [f["name"] for f in json.loads(outcome.out)["findings"]]
    assert names == ["reference-window", "window-used", "memory-line", "length-limited"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of MODEL"),
        (["gemma3-270m", "--log", "x"], "give one of MODEL"),
        (["nowhere"], "no model at 'nowhere'"),
        (["--log", "nowhere"], "can't be read"),
        (["--log", "x", "--transformers"], "--transformers needs a MODEL"),
        (["--url", "http://x", "--page-size", "4", "--debug"], "--page-size, --debug: options of an engine"),
        (["their-model", "--transformers", "--max-model-len", "4"], "--max-model-len: options of an engine"),
        (["--url", "127.0.0.1"], "must begin with http://"),
        (["--url", "http://127.0.0.1:9"], "can't be reached"),
        (["--symptom", "hungry", "--log", "x"], "is unknown; use repeats"),
        (["--transformers", "--log", "x"], "--transformers needs a MODEL"),
        (["--page-size", "8", "--debug", "--log", "x"], "--page-size, --debug: options of an engine that sash starts"),
        (["gemma3-270m", "--transformers", "--dtype", "float32"], "--dtype: options of an engine"),
        (["--max-num-seqs", "0", "gemma3-270m"], "max_num_seqs must be at least 1"),
    ],
)
def test_where_it_can_t_look_it_ends_with_two(run: Run, arguments: list[str], message: str) -> None:
    outcome = run("doctor", *arguments)
    assert outcome.code == 2 and message in outcome.err and not outcome.out


def test_a_model_is_examined_with_the_options(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []

    def examine(model: str, options: EngineConfig, say: object) -> list[Finding]:
        given.extend([model, options.page_size])
        return [ok("reach", "far"), BAD]

    monkeypatch.setattr(sash.doctor.engine, "examine_model", examine)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    outcome = run("doctor", str(tmp_path), "--page-size", "4")
    assert outcome.code == 1 and given == [str(tmp_path), 4]
    assert outcome.out.index("distance 8 is seen") < outcome.out.index("far")


def test_a_server_a_log_and_transformers(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sash.doctor.server, "examine_server", lambda client, say: [ok("alive", client.url)])
    assert "http://other:1" in run("doctor", "--url", "http://other:1/v1").out
    log = tmp_path / "log"
    log.write_text('{"event": "giving_up", "max_restarts": 3}\n')
    assert run("doctor", "--log", str(log)).code == 1
    monkeypatch.setattr(sash.doctor.transformers_model, "open_theirs", lambda model: model)
    monkeypatch.setattr(sash.doctor.transformers_model, "examine_theirs", lambda model: [ok("latency", model)])
    assert "their-model" in run("doctor", "their-model", "--transformers").out
