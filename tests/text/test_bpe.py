"""The GGUF "gpt2" tokenizer on small files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.gguf_files import write_gguf
from transformers import AutoTokenizer

from sash.spec.errors import ModelError
from sash.text.base import Tokenizer
from sash.text.bpe import RULES
from sash.text.fast import byte_alphabet
from sash.text.load import load_tokenizer


def bpe_file(tmp_path: Path, keys: Mapping[str, Any] | None = None, words: Sequence[str] = ()) -> Path:
    """All bytes, merges that build ``words`` from the left, one user-defined and two control tokens."""
    tokens, merges = list(byte_alphabet()), []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    extra = ["<think>", "<|bos|>", "<|end|>"]
    base = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens + extra,
        "tokenizer.ggml.merges": merges or ["a b"],
        "tokenizer.ggml.token_type": np.array([1] * len(tokens) + [4, 3, 3], np.int32),
        "tokenizer.ggml.bos_token_id": len(tokens) + 1,
        "tokenizer.ggml.eos_token_id": len(tokens) + 2,
    }
    if not merges:
        base["tokenizer.ggml.tokens"] = ["ab", *tokens[1:], *extra]
    return write_gguf(tmp_path / "bpe.gguf", "llama", base | dict(keys or {}))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_bytes(i).decode() for i in tokenizer.encode(text, add_bos=False)]


@pytest.mark.parametrize(
    ("pre", "want"),
    [
        ("gpt-2", ["1234", "\n", "\n", "I", "'", "L", "L"]),
        ("default", ["1234", "\n", "\n", "I", "'", "L", "L"]),
        ("smollm", ["1", "2", "3", "4", "\n", "\n", "I", "'", "L", "L"]),
        ("llama-bpe", ["123", "4", "\n\n", "I", "'LL"]),
        ("qwen2", ["1", "2", "3", "4", "\n\n", "I", "'LL"]),
    ],
)
def test_the_pre_tokenizer_cuts_as_its_name_says(tmp_path: Path, pre: str, want: list[str]) -> None:
    """Merges for every run exist, so only the cuts keep them apart."""
    newlines = "".join(c for c, b in byte_alphabet().items() if b == 10) * 2
    path = bpe_file(tmp_path, {"tokenizer.ggml.pre": pre}, ["1234", newlines, "'LL"])
    tokenizer = load_tokenizer(path)
    if pre in ("gpt-2", "default"):  # GPT-2's contractions are lower case and its spaces cut off one character
        assert pieces(tokenizer, "1234") == ["1234"]
        assert pieces(tokenizer, "I'LL") == ["I", "'", "L", "L"]
        assert pieces(tokenizer, "\n\nI") == ["\n", "\n", "I"]
    else:
        assert pieces(tokenizer, "1234\n\nI'LL") == want


@pytest.mark.parametrize("pre", [p for p in RULES if p not in ("default", "smollm", "gpt2", "gpt-2")])
def test_cuts_equal_transformers_own(tmp_path: Path, pre: str) -> None:
    """transformers builds the same file with the pattern it keeps for this name."""
    path = bpe_file(tmp_path, {"tokenizer.ggml.pre": pre}, ["1234", "'ll", "the", "Ġthe", "ĊĊ", "ĠĠĠ", "((", "..."])
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer
    if RULES[pre].whole_words:  # on in Llama 3's published tokenizer.json, left off by transformers
        theirs.model.ignore_merges = True
    ours = load_tokenizer(path)
    for text in [
        "the  the\n\n  12345 it'll IT'LL ((...",
        "x\r\n\r\n y",
        "   the",
        "a...\n\nb",
        "é١٢٣٤ ",
        "the\u3000the",
    ]:
        assert ours.encode(text, add_bos=False) == theirs.encode(text, add_special_tokens=False).ids, text


def test_user_defined_tokens_always_match_and_control_tokens_when_parsed(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(bpe_file(tmp_path, {"tokenizer.ggml.add_bos_token": True}, ["hi"]))
    think, bos, end = (tokenizer.vocab_size - n for n in (3, 2, 1))
    assert tokenizer.special_ids == {bos, end}
    assert tokenizer.encode("<think>hi<|end|>")[:2] == [bos, think]
    assert end not in tokenizer.encode("<think>hi<|end|>")
    parsed = tokenizer.encode("<|bos|><think>hi<|end|>", parse_special=True)
    assert [parsed[0], parsed[1], parsed[-1]] == [bos, think, end]
    assert parsed.count(bos) == 1
    assert tokenizer.decode(parsed) == "<think>hi"
    assert tokenizer.decode(parsed, skip_special=False) == "<|bos|><think>hi<|end|>"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"tokenizer.ggml.pre": "unheard-of"}, "tokenizer.ggml.pre is 'unheard-of'; gpt-2, .*llama-bpe.*qwen2"),
        ({"tokenizer.ggml.merges": None}, r"has no tokenizer\.ggml\.merges"),
        ({"tokenizer.ggml.merges": ["never seen"]}, r"tokenizer\.ggml\.merges don't fit its tokens"),
        ({"tokenizer.ggml.bos_token_id": 99999}, r"tokenizer\.ggml\.bos_token_id is 99999, must be below"),
    ],
)
def test_a_broken_bpe_file_is_refused(tmp_path: Path, keys: Any, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        load_tokenizer(bpe_file(tmp_path, keys, ["hi"]))


@pytest.mark.parametrize(("pre", "want"), [("llama-bpe", ["ab"]), ("qwen2", ["a", "b"])])
def test_llama_3_takes_a_word_that_is_a_token_without_merging(tmp_path: Path, pre: str, want: list[str]) -> None:
    alphabet = list(byte_alphabet())
    keys = {
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*alphabet, "ab", "cd"],
        "tokenizer.ggml.merges": ["c d"],
        "tokenizer.ggml.token_type": np.array([1] * 258, np.int32),
        "tokenizer.ggml.bos_token_id": None,
        "tokenizer.ggml.eos_token_id": None,
    }
    assert pieces(load_tokenizer(bpe_file(tmp_path, keys)), "ab") == want


@pytest.mark.parametrize(("pre", "want"), [("qwen2", "\u00e9"), ("llama-bpe", "e\u0301")])
def test_qwen_composes_characters(tmp_path: Path, pre: str, want: str) -> None:
    tokenizer = load_tokenizer(bpe_file(tmp_path, {"tokenizer.ggml.pre": pre}))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == want
