from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.scripted import Run

from sash.cli.inspect import ranges

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 1,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 7,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-qwen"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder / "config.json"


def test_every_layer_has_its_span_and_the_field_behind_it(run: Run, config: Path) -> None:
    document = json.loads(run("inspect", str(config), "--json").out)
    assert (document["name"], document["kind"]) == ("tiny-qwen", "config")
    assert [layer["span"]["window"] for layer in document["layers"]] == [0, 8, 8]
    assert all("max_window_layers" in layer["span_source"] for layer in document["layers"])
    assert [group["layers"] for group in document["groups"]] == [[0], [1, 2]]


def test_tables_for_people(run: Run, config: Path) -> None:
    outcome = run("inspect", str(config))
    assert outcome.code == 0
    for words in (["1", "window 8", "max_window_layers", "base 10000"], ["window", "1-2", "64"], ["full", "32"]):
        assert any(all(word in line for word in words) for line in outcome.out.splitlines()), outcome.out


def test_a_folder_s_generation_config_adds_end_tokens(run: Run, config: Path) -> None:
    generation = config.parent / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [9, 7, 8]}))
    assert json.loads(run("inspect", str(config.parent), "--json").out)["stop_token_ids"] == [7, 9, 8]
    generation.write_text(json.dumps({"eos_token_id": "x"}))
    outcome = run("inspect", str(config.parent))
    assert outcome.code == 2
    assert "eos_token_id" in outcome.err


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[]", "must hold a JSON object")])
def test_broken_description_is_refused(run: Run, config: Path, text: str, message: str) -> None:
    config.write_text(text)
    outcome = run("inspect", str(config))
    assert outcome.code == 2
    assert message in outcome.err


def test_missing_model_exits_with_2(run: Run) -> None:
    outcome = run("inspect", "no-such-model")
    assert outcome.code == 2
    assert "gemma3-270m" in outcome.err


def test_ranges() -> None:
    assert ranges([0, 1, 2, 3, 4, 6, 7, 9]) == "0-4, 6-7, 9"
    assert ranges([]) == ""
