"""A model's tokenizer as the files that transformers' AutoTokenizer reads, with the same ids as sash's own.

Format: tokenizer.json of github.com/huggingface/tokenizers, tokenizer_config.json of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from sash.spec.errors import ModelError
from sash.spec.ggml import TokenType
from sash.spec.gguf import GgufHeader, open_gguf
from sash.spec.load import read_json
from sash.spec.locate import ModelSource
from sash.text.base import SPACE, Tokenizer
from sash.text.fast import FastTokenizer
from sash.text.load import load_tokenizer
from sash.text.spm import SentencePieceTokenizer, piece_types

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json")
# What an export is held to before it is written, beside the model's own user-defined and control tokens.
_PROBES = (
    *("Hello world", " a  b   c", "don't THEY'LL", "x = 3.14159e10", "1234567", "naïve Straße ﬁ½²Ⅷ", "e\u0301a\u0308"),
    *("滑动窗口注意力", "日本語テスト", "한국어 русский العربية ١٢٣", "😊🎉👩‍👩‍👧🇩🇪", "\0\x7f\ufeff\u200b\U0010ffff"),
    *(
        "\t\t\tif (a && b) {\r\n",
        "\n" * 70,
        " " * 70,
        "a" + " " * 45 + "b",
        "<0x41></s><b>[x]",
        "banana" * 9,
        "aaaaaaa",
    ),
    *("\u2581\u2581x \u2581", "http://a.b/c?d=e#f", "ſhort ǆ ẞ", "한", "\u00a0\u3000 x", ""),
)


def tokenizer_files(source: ModelSource, max_length: int, chat_template: str | None = None) -> dict[str, str]:
    """The text of each of ``FILES`` for a GGUF file or a folder with tokenizer.json.

    ``max_length`` is the model's context in tokens; ``chat_template``, jinja source, replaces the model's own.

    Raises:
        ModelError: no tokenizer, or one whose ids the files could not repeat.
    """
    tokenizer = load_tokenizer(source.path)
    if source.kind == "folder":
        document = (source.path / "tokenizer.json").read_text(encoding="utf-8")
        names = _folder_names(source.path)
        model_type = read_json(source.path / "config.json").get("model_type")
    else:
        header = open_gguf(source.path, partial=True)
        document = _as_json(tokenizer, header)
        names = _gguf_names(header)
        model_type = str(header.get("general.architecture"))
        model_type = _MODEL_TYPES.get(model_type, model_type)
    _check(tokenizer, document, source.path)
    special = {name: names[name] for name in _ROLES if names.get(name) is not None}
    config: dict[str, Any] = {
        **special,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    template = chat_template if chat_template is not None else tokenizer.chat_template
    if template is not None:
        config["chat_template"] = template
    return {
        "tokenizer.json": document,
        "tokenizer_config.json": _text(config),
        "special_tokens_map.json": _text(special),
        # Clients look up the model's family before they read its tokenizer.
        "config.json": _text({"model_type": model_type, "max_position_embeddings": max_length}),
    }


# GGUF's name of an architecture: transformers' name, where they differ.
_MODEL_TYPES = {"gemma3": "gemma3_text"}
# transformers' name of a token's role: GGUF's.
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False, indent=2) + "\n"


def _gguf_names(header: GgufHeader) -> dict[str, str]:
    tokens: list[str] = header["tokenizer.ggml.tokens"]
    ids = {role: header.get(f"tokenizer.ggml.{name}_token_id") for role, name in _ROLES.items()}
    return {role: tokens[i] for role, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}


def _folder_names(folder: Path) -> dict[str, str]:
    """A token is written as text or as an object with its text under ``content``."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        found |= read_json(folder / name) if (folder / name).is_file() else {}
    texts = {role: token.get("content") if isinstance(token, dict) else token for role, token in found.items()}
    return {role: text for role, text in texts.items() if isinstance(text, str)}


def _as_json(tokenizer: Tokenizer, header: GgufHeader) -> str:
    if isinstance(tokenizer, SentencePieceTokenizer):
        inner = _from_pieces(header, tokenizer.strips_space)
    elif isinstance(tokenizer, FastTokenizer):
        inner = tokenizer.copy_of_inner()
    else:
        raise ModelError(f"{header.path}: a {type(tokenizer).__name__} has no form as tokenizer.json")
    if tokenizer.adds_bos and tokenizer.bos_token_id is not None:
        bos = inner.id_to_token(tokenizer.bos_token_id)
        inner.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
    text: str = inner.to_str()
    return text


def _from_pieces(header: GgufHeader, space_prefix: bool) -> tokenizers.Tokenizer:
    """SentencePiece's merging by score as byte-pair merging by rank."""
    tokens: list[str] = header["tokenizer.ggml.tokens"]
    types = piece_types(header)
    if len(set(tokens)) < len(tokens) or TokenType.UNUSED in types:
        raise ModelError(f"{header.path}: a vocabulary with unused or repeated pieces has no form as tokenizer.json")
    mergeable = {token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.NORMAL}
    scored = sorted(
        ((score, token) for score, token in zip(header["tokenizer.ggml.scores"], tokens, strict=True)),
        key=lambda entry: -entry[0],
    )
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=list(_merges((token for _, token in scored if token in mergeable), mergeable)),
        unk_token=tokens[types.index(TokenType.UNKNOWN)],
        byte_fallback=types.count(TokenType.BYTE) == 256,
        fuse_unk=True,
    )
    inner = tokenizers.Tokenizer(model)
    escape = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        inner.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), escape])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        inner.normalizer = escape
    inner.decoder = decoders.Sequence(steps)
    controls = [t for t, kind in zip(tokens, types, strict=True) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)]
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in controls if token])
    # Cut out of the text once spaces are escaped, as runs of spaces are such tokens too. A prefix would be put
    # before the tokens themselves, so with one they are found in the plain text.
    literal = [t for t, kind in zip(tokens, types, strict=True) if kind == TokenType.USER_DEFINED and t]
    inner.add_tokens([AddedToken(token, normalized=not space_prefix) for token in literal])
    return inner


def _merges(by_rank: Iterable[str], known: set[str]) -> Iterator[tuple[str, str]]:
    """Every way in which two pieces make a third, the best-scored third first."""
    for piece in by_rank:
        for cut in range(len(piece) - 1, 0, -1):
            left, right = piece[:cut], piece[cut:]
            if left in known and right in known:
                yield left, right


def _check(tokenizer: Tokenizer, document: str, source: Path) -> None:
    """Raises ModelError unless the document gives a set of texts the ids that sash's tokenizer gives."""
    inner = tokenizers.Tokenizer.from_str(document)
    added = [token.content for token in inner.get_added_tokens_decoder().values()]
    texts = [*_PROBES, *(f"a{token}b {token}{token}" for token in (*added[:50], *added[-50:]))]
    for parse_special in (False, True):
        inner.encode_special_tokens = not parse_special
        for text in texts:
            wanted = tokenizer.encode(text, add_bos=False, parse_special=parse_special)
            got = inner.encode(text, add_special_tokens=False).ids
            if got != wanted:
                raise ModelError(
                    f"{source}: as tokenizer.json it would give {text!r} the ids {got}, the model's own are {wanted}; "
                    f"use the tokenizer.json that the model was published with"
                )
