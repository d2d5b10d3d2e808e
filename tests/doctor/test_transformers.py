"""A model that transformers runs: what its cache weighs, and what doctor says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.conftest import save_tokenizer
from tests.families import build

from sash.doctor.finding import Status
from sash.doctor.transformers_model import Theirs, examine_theirs, open_theirs
from sash.spec.errors import ModelError


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    _, folder = build("gemma3", tmp_path_factory.mktemp("tiny"))
    save_tokenizer(folder)
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    return open_theirs(str(folder))


def test_bytes_by_length(theirs: Theirs) -> None:
    found = {f.name: f for f in examine_theirs(theirs, [16, 60, 100])}
    assert found["latency"].status is found["memory-line"].status is Status.OK
    assert "windows of 5" in found["memory-line"].evidence
    # One full layer of one head of 32 in float32: 256 bytes a token; window layers add nothing.
    assert "0.25 KiB a token at the end" in found["memory-line"].evidence
    assert "6 layers with a window of 5" in found["window-used"].evidence
    assert found["window-used"].status is Status.OK


def test_full_storage_behind_a_window_mask(theirs: Theirs, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    inner: Any = transformers.DynamicCache
    monkeypatch.setattr(transformers, "DynamicCache", lambda config: inner())
    found = {f.name: f for f in examine_theirs(theirs, [16, 60])}["window-used"]
    assert found.status is Status.WARN and "saves no memory" in found.cause


def test_what_it_can_t_load(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="transformers can't load"):
        open_theirs(str(tmp_path))


def test_answers_are_tokens(theirs: Theirs) -> None:
    assert isinstance(theirs.answer("abc", 3), str)
    assert theirs.tokens_per_word > 1
    assert torch.is_inference_mode_enabled() is False
