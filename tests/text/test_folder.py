"""Tokenizers of folders in Hugging Face form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.text.spm_files import SPM_TOKENS, spm_file
from tokenizers import Tokenizer as InnerTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from sash.spec.errors import ModelError, RequestError
from sash.text.fast import byte_alphabet
from sash.text.load import load_tokenizer


def byte_level_folder(folder: Path, config: Mapping[str, Any] | None = None) -> Path:
    """A tokenizer.json with all bytes, a BOS that its post-processor adds, and a control token."""
    inner = InnerTokenizer(models.BPE(vocab={c: i for i, c in enumerate(byte_alphabet())}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "<end>"])
    inner.add_tokens(["<tool>"])
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    folder.mkdir(exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_uses_its_own_post_processor(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "<end>", "chat_template": "{{ messages }}"}
    tokenizer = load_tokenizer(byte_level_folder(tmp_path / "m", config))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.adds_bos) == (256, 257, True)
    assert tokenizer.special_ids == {256, 257}
    assert tokenizer.chat_template == "{{ messages }}"
    a = tokenizer.encode("a", add_bos=False)
    assert len(a) == 1
    assert tokenizer.encode("a") == [256, *a]
    assert tokenizer.encode("<s>a", parse_special=True) == [256, *a]
    assert tokenizer.encode("<s>a<tool>", parse_special=True) == [256, *a, 258]
    assert tokenizer.encode("<s>a")[:2] == [256, *tokenizer.encode("<", add_bos=False)]
    assert tokenizer.encode("<tool>") == [256, 258]
    assert tokenizer.decode(tokenizer.encode("é 🎉<tool>")) == "é 🎉<tool>"
    assert (tokenizer.token_bytes(999), tokenizer.token_bytes(-1)) == (b"", b"")


def test_a_tokenizer_json_may_be_named_itself(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path / "m")
    assert load_tokenizer(folder / "tokenizer.json").vocab_size == 259


@pytest.mark.parametrize(
    ("config", "files", "want"),
    [
        ({"chat_template": "config"}, {}, "config"),
        ({"chat_template": "config"}, {"chat_template.jinja": "file"}, "file"),
        ({"chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]}, {}, "d"),
        ({}, {"chat_template.json": '{"chat_template": "json"}'}, "json"),
        ({}, {}, None),
    ],
)
def test_where_a_folder_keeps_its_chat_template(
    tmp_path: Path, config: dict[str, Any], files: dict[str, str], want: str | None
) -> None:
    folder = byte_level_folder(tmp_path / "m", config)
    for name, content in files.items():
        (folder / name).write_text(content)
    assert load_tokenizer(folder).chat_template == want


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_like_folder(tmp_path: Path, prefix: bool) -> None:
    vocab = {t: i for i, t in enumerate(t for t in SPM_TOKENS if " " not in t)}
    merges = [("a", "b"), ("\u2581", "a")]
    inner = InnerTokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    steps = [normalizers.Prepend("\u2581")] if prefix else []
    inner.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    inner.decoder = decoders.Sequence(parts)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.strips_space is prefix
    for text in ["ab a", "é🎉", " a", "b<0x41>"]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text == inner.decode(ids)


def test_words_without_a_decoder_are_joined_with_spaces(tmp_path: Path) -> None:
    inner = InnerTokenizer(models.WordLevel({"sliding": 0, "window": 1}, unk_token="sliding"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("sliding window")) == "sliding window"


def test_what_a_folder_may_lack_is_named_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json; write one there with transformers"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="can't be read as a tokenizer"):
        load_tokenizer(tmp_path)
    folder = byte_level_folder(tmp_path / "m", {"bos_token": "<nothing>"})
    with pytest.raises(ModelError, match="token '<nothing>' is named as BOS or EOS"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("[1")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(folder)
    with pytest.raises(ModelError, match="nowhere"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bos_token": 5}, "bos_token in .* must be the token's text, or null; got 5"),
        ({"eos_token": {"content": ["a"]}}, "eos_token in .* must be the token's text"),
        ({"chat_template": 5}, "chat_template in .* must be text or null, got 5"),
        ({"chat_template": [{"name": "default", "template": {}}]}, "chat_template in .* must be text or null"),
    ],
)
def test_a_config_of_other_types_is_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_tokenizer(byte_level_folder(tmp_path / "m", config))


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path / "m", {})
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja can't be read as UTF-8"):
        load_tokenizer(folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(folder)


def test_a_decoder_without_bytes_per_token_is_refused(tmp_path: Path) -> None:
    inner = InnerTokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    inner.decoder = decoders.WordPiece()
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="decoder WordPiece isn't supported"):
        load_tokenizer(tmp_path)


def test_lone_surrogates_are_refused(tmp_path: Path, own_cache: Path) -> None:
    for tokenizer in (load_tokenizer(byte_level_folder(tmp_path / "m")), load_tokenizer(spm_file(tmp_path))):
        with pytest.raises(RequestError, match="lone surrogate at character 1"):
            tokenizer.encode("a\ud800")
