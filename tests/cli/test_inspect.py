from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.cli.scripted import Run

from sash.cli.inspect import print_spec, ranges
from sash.spec.load import load_spec
from sash.spec.locate import locate

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
    for words in (
        ["1-2", "window 8", "4/2", "base 10000"],
        ["from 1", "max_window_layers"],
        ["window", "1-2", "128"],
        ["full", "64"],
        ["RMS norm before attention and MLP"],
    ):
        assert any(all(word in line for word in words) for line in outcome.out.splitlines()), outcome.out


GPT_OSS: dict[str, Any] = CONFIG | {
    "architectures": ["GptOssForCausalLM"],
    "num_hidden_layers": 24,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "quantization_config": {"quant_method": "mxfp4"},
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("values", [CONFIG, GPT_OSS])
def test_a_terminal_of_80_columns_shows_whole_cells(config: Path, values: dict[str, Any]) -> None:
    config.write_text(json.dumps(values))
    source = locate(config, allow_config=True)
    out = io.StringIO()
    print_spec(Console(file=out, width=80, highlight=False), source, load_spec(source))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("window 8" in line and "4/2" in line and "base 10000" in line for line in lines), out.getvalue()
    assert len(lines) < 30


def test_quantized_weights_are_noted(run: Run, config: Path) -> None:
    config.write_text(json.dumps(GPT_OSS))
    outcome = run("inspect", str(config))
    assert outcome.code == 0
    for words in (["note: quantization_config", "mxfp4", "bf16"], ["every layer: learned sinks, 32 experts, 4 used"]):
        assert any(all(word in line for word in words) for line in outcome.out.splitlines()), outcome.out


def test_windows_listed_layer_by_layer_are_one_source(run: Run, config: Path) -> None:
    config.write_text(json.dumps(CONFIG | {"attention_window": [8, 8, 4]}))
    out = run("inspect", str(config)).out
    assert ("from 1" in out, "from 2" in out) == (True, False), out


@pytest.mark.parametrize(("file", "name"), [("config.json", "tiny-qwen"), ("mistral.json", "mistral")])
def test_a_description_is_called_by_its_folder_or_its_own_name(run: Run, config: Path, file: str, name: str) -> None:
    path = config.rename(config.parent / file)
    assert json.loads(run("inspect", str(path), "--json").out)["name"] == name


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
    assert ranges(range(0, 24, 2)) == "0, 2, …, 22"
    assert ranges([0, 1, 3, 4, 6, 7, 9, 10, 12]) == "0-1, 3-4, 6-7, 9-10, 12"
    assert ranges([]) == ""
