from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.scripted import Run
from tests.cli.test_inspect import CONFIG
from tests.text.test_folder import byte_level_folder

NAMES = ["config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = byte_level_folder(tmp_path / "model", {"bos_token": "<s>", "eos_token": "<end>"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_a_folder_is_made_and_filled(run: Run, model: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    out = tmp_path / "deep" / "out"
    outcome = run("export-tokenizer", str(model), str(out), "--chat-template", str(template))
    assert outcome.code == 0 and "tokenizer.json" in outcome.out
    assert sorted(path.name for path in out.iterdir()) == NAMES
    config = json.loads((out / "tokenizer_config.json").read_text())
    assert (config["model_max_length"], config["chat_template"]) == (256, "{{ messages }}")


def test_nothing_is_replaced_unless_asked(run: Run, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("mine")
    outcome = run("export-tokenizer", str(model), str(out))
    assert outcome.code == 2 and "has config.json already" in outcome.err and "--force" in outcome.err
    assert [path.name for path in out.iterdir()] == ["config.json"]
    assert run("export-tokenizer", str(model), str(out), "--force").code == 0
    assert sorted(path.name for path in out.iterdir()) == NAMES
    assert (out / "config.json").read_text() != "mine"


def test_the_model_s_own_folder_is_never_written(run: Run, model: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    link = tmp_path / "link"
    link.symlink_to(model)
    for target in (model, link):
        outcome = run("export-tokenizer", str(model), str(target), "--force")
        assert outcome.code == 2 and "the model's own folder" in outcome.err
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


@pytest.mark.parametrize("bad", [b"\xff", None])
def test_a_template_that_can_not_be_read_is_named(run: Run, model: Path, tmp_path: Path, bad: bytes | None) -> None:
    template = tmp_path / "t.jinja"
    if bad is not None:
        template.write_bytes(bad)
    outcome = run("export-tokenizer", str(model), str(tmp_path / "out"), "--chat-template", str(template))
    assert outcome.code == 2 and "--chat-template" in outcome.err
    assert not (tmp_path / "out").exists()


def test_a_place_that_can_not_be_written_is_named(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = run("export-tokenizer", str(model), str(tmp_path / "file" / "out"))
    assert outcome.code == 2 and "can't be written" in outcome.err
