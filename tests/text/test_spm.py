"""The GGUF "llama" tokenizer on small files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tests.text.spm_files import AB, SPACE, SPACE_A, SPM_TOKENS, SPM_TYPES, TWO_SPACES, A, B, spm_file

from sash.spec.errors import ModelError
from sash.spec.gguf import open_gguf
from sash.text import spm
from sash.text.base import SpecialSplitter
from sash.text.load import load_tokenizer


def test_the_space_before_a_text_is_the_files_choice(tmp_path: Path, own_cache: Path) -> None:
    with_space = load_tokenizer(spm_file(tmp_path))
    assert with_space.encode("ab") == [1, SPACE, AB]
    assert with_space.encode("aa") == [1, SPACE_A, A]
    assert with_space.decode([1, SPACE_A, B]) == "ab"
    assert with_space.decode([1, SPACE_A, SPACE_A]) == "a a"
    assert with_space.encode("<s>ab</s>a", parse_special=True) == [1, SPACE, AB, 2, SPACE_A]
    without = load_tokenizer(spm_file(tmp_path, {"tokenizer.ggml.add_space_prefix": False}))
    assert without.encode("ab") == [1, AB]
    assert without.decode([1, SPACE_A, B]) == " ab"


def test_bos_only_where_the_file_wants_it(tmp_path: Path, own_cache: Path) -> None:
    tokenizer = load_tokenizer(spm_file(tmp_path, {"tokenizer.ggml.add_bos_token": False}))
    assert (tokenizer.adds_bos, tokenizer.encode("a")) == (False, [SPACE_A])


def test_unknown_characters_become_byte_tokens(tmp_path: Path, own_cache: Path) -> None:
    tokenizer = load_tokenizer(spm_file(tmp_path, {"tokenizer.ggml.add_space_prefix": False}))
    assert tokenizer.encode("é  <x>", add_bos=False) == [3 + 0xC3, 3 + 0xA9, TWO_SPACES, len(SPM_TOKENS) - 1]
    assert tokenizer.decode([3 + 0xC3, 3 + 0xA9]) == "é"
    assert tokenizer.decode([3 + 0xC3]) == "\ufffd"


def test_the_model_is_what_sentencepiece_s_own_definitions_read(tmp_path: Path) -> None:
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(spm._model_bytes(open_gguf(spm_file(tmp_path))))
    assert [piece.type for piece in proto.pieces] == SPM_TYPES
    assert [piece.piece for piece in proto.pieces] == [t.replace(" ", "\u2581") for t in SPM_TOKENS]
    assert [piece.score for piece in proto.pieces][-3:] == [-263.0, -264.0, -265.0]
    assert proto.trainer_spec.model_type == proto.trainer_spec.BPE
    assert (proto.trainer_spec.byte_fallback, proto.trainer_spec.vocab_size) == (True, len(SPM_TOKENS))
    assert proto.normalizer_spec.add_dummy_prefix
    assert not proto.normalizer_spec.remove_extra_whitespaces
    assert proto.normalizer_spec.escape_whitespaces


def test_empty_and_repeated_tokens_do_not_stop_a_file(tmp_path: Path, own_cache: Path) -> None:
    tokens = [*SPM_TOKENS, "", "ab"]
    keys = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.zeros(len(tokens), np.float32),
        "tokenizer.ggml.token_type": np.array([*SPM_TYPES, 1, 1], np.int32),
    }
    tokenizer = load_tokenizer(spm_file(tmp_path, keys))
    assert tokenizer.decode([1, AB, len(tokens) - 2, len(tokens) - 1]) == "abab"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'; llama"),
        ({"tokenizer.ggml.scores": None}, "has no tokenizer.ggml.scores"),
        ({"tokenizer.ggml.scores": np.zeros(3, np.float32)}, "differ in length"),
        ({"tokenizer.ggml.unknown_token_id": 9999}, "unknown_token_id is out of range"),
    ],
)
def test_a_broken_sentencepiece_file_is_refused(tmp_path: Path, own_cache: Path, keys: Any, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        load_tokenizer(spm_file(tmp_path, keys))


def test_the_cache_key_depends_on_everything_the_model_is_built_from(tmp_path: Path) -> None:
    changed = {
        "tokenizer.ggml.tokens": [*SPM_TOKENS[:-1], "<y>"],
        "tokenizer.ggml.scores": np.zeros(len(SPM_TYPES), np.float32),
        "tokenizer.ggml.token_type": np.array([*SPM_TYPES[:-1], 1], np.int32),
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.add_space_prefix": False,
    }
    keys = {spm._key(open_gguf(spm_file(tmp_path, change))) for change in [{}, *({k: v} for k, v in changed.items())]}
    assert len(keys) == 1 + len(changed)
    assert spm._key(open_gguf(spm_file(tmp_path))) in keys


def test_special_tokens_are_cut_leftmost_longest() -> None:
    splitter = SpecialSplitter({"<a>": 1, "<a><b>": 2, "[x]": 3, "": 4})
    assert list(splitter.split("<a><b><a>t<[x]<")) == [2, 1, "t<", 3, "<"]
    assert list(splitter.split("")) == []
    assert list(SpecialSplitter({}).split("<a>")) == ["<a>"]


def test_the_rebuilt_merges_equal_a_trained_model_s(tmp_path: Path, own_cache: Path) -> None:
    """A model that sentencepiece itself trained, taken apart into GGUF arrays and rebuilt."""
    corpus = [Path(__file__).read_text(encoding="utf-8")[i : i + 200] for i in range(0, 12000, 200)]
    (tmp_path / "corpus.txt").write_text("\n".join(corpus))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"), model_prefix=str(tmp_path / "t"), vocab_size=500, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        user_defined_symbols=["\u2581\u2581", "<x>"], minloglevel=2,
    )  # fmt: skip
    trained = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "t.model"))
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString((tmp_path / "t.model").read_bytes())
    keys = {
        "tokenizer.ggml.tokens": [p.piece.replace("\u2581", " ") if p.type == 4 else p.piece for p in proto.pieces],
        "tokenizer.ggml.scores": np.array([p.score for p in proto.pieces], np.float32),
        "tokenizer.ggml.token_type": np.array([p.type for p in proto.pieces], np.int32),
    }
    rebuilt = load_tokenizer(spm_file(tmp_path, keys))
    for text in [*corpus, "  <x> é\t🎉\0", "", " "]:
        ids = rebuilt.encode(text, add_bos=False)
        assert ids == trained.encode(text)
        assert rebuilt.decode(ids) == trained.decode(ids)
