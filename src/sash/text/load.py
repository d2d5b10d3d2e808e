"""Finds and builds the tokenizer that belongs to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as InnerTokenizer

from sash.spec.errors import ModelError
from sash.spec.gguf import open_gguf
from sash.spec.load import read_json
from sash.text.base import Tokenizer
from sash.text.bpe import bpe_from_gguf
from sash.text.fast import FastTokenizer
from sash.text.spm import SentencePieceTokenizer


def load_tokenizer(source: str | Path) -> Tokenizer:
    """The tokenizer in a .gguf file or in a folder with tokenizer.json.

    Raises:
        ModelError: nothing there, or a kind of tokenizer sash can't run; the message says what to do.
    """
    path = Path(source)
    if path.is_dir():
        return _from_folder(path)
    if path.name == "tokenizer.json" and path.is_file():
        return _from_folder(path.parent)
    header = open_gguf(path, partial=True)
    kind = header.get("tokenizer.ggml.model")
    if kind == "llama":
        return SentencePieceTokenizer(header)
    if kind == "gpt2":
        return bpe_from_gguf(header)
    raise ModelError(
        f"{path}: tokenizer.ggml.model is {kind!r}; llama (SentencePiece by score) and gpt2 (byte-level BPE) are "
        f"supported"
    )


def _from_folder(folder: Path) -> FastTokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json; write one there with transformers: "
            f"AutoTokenizer.from_pretrained(MODEL).save_pretrained({str(folder)!r})"
        )
    try:
        inner = InnerTokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower type
        raise ModelError(f"{file} can't be read as a tokenizer ({error}); copy or download it again") from error
    config = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
    return FastTokenizer(
        inner,
        bos_token=_content(folder, config, "bos_token"),
        eos_token=_content(folder, config, "eos_token"),
        chat_template=_chat_template(folder, config),
        source=str(folder),
    )


def _json(file: Path) -> dict[str, Any]:
    return dict(read_json(file)) if file.is_file() else {}


def _content(folder: Path, config: dict[str, Any], name: str) -> str | None:
    """A token is written as text or as an object with its text under ``content``."""
    token = config.get(name)
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise ModelError(f"{name} in {folder}/tokenizer_config.json must be the token's text, or null; got {token!r}")
    return text


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, or the config's template, or its list's entry named default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{file} can't be read as UTF-8 text ({error}); copy or download it again") from error
    template = config.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default") or next(iter(named.values()), None)
    if template is not None and not isinstance(template, str):
        raise ModelError(f"chat_template in {folder}/tokenizer_config.json must be text or null, got {template!r}")
    return template
