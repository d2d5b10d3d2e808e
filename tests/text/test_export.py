"""A written tokenizer folder, read by transformers, against sash's own tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fixtures.make_tokenizer_golden import random_text
from tests.real_models import real_model
from tests.text.spm_files import SPM_TOKENS, SPM_TYPES, spm_file
from tests.text.test_bpe import bpe_file
from tests.text.test_folder import byte_level_folder
from transformers import AutoTokenizer

from sash.spec.errors import ModelError
from sash.spec.locate import ModelSource
from sash.text.base import Tokenizer
from sash.text.chat import render_chat
from sash.text.export import FILES, tokenizer_files
from sash.text.load import load_tokenizer

FIXTURES = Path(__file__).parents[1] / "fixtures"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi  there\n"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "滑动 <|im_end|>"},
]


def export(source: ModelSource, folder: Path, chat_template: str | None = None) -> tuple[Any, Tokenizer]:
    """transformers' tokenizer of the written folder, and sash's own of the model."""
    folder.mkdir()
    for name, text in tokenizer_files(source, 512, chat_template).items():
        (folder / name).write_text(text, encoding="utf-8")
    return AutoTokenizer.from_pretrained(folder), load_tokenizer(source.path)


def assert_same(theirs: Any, own: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        for parse_special in (False, True):
            ids = own.encode(text, add_bos=False, parse_special=parse_special)
            got = theirs(text, add_special_tokens=False, split_special_tokens=not parse_special).input_ids
            assert got == ids, (text, parse_special)
            for skip in (False, True):
                assert theirs.decode(ids, skip_special_tokens=skip) == own.decode(ids, skip_special=skip), text


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "golden", "pad", "unknown"),
    [("gemma3-270m", "gemma", "<pad>", "<unk>"), ("smollm2-135m", "smollm2", "<|im_end|>", "<|endoftext|>")],
)
def test_a_real_model(tmp_path: Path, name: str, golden: str, pad: str, unknown: str) -> None:
    """One test for all, as the folder takes seconds to make."""
    theirs, own = export(ModelSource("gguf", real_model(name), name), tmp_path / name)
    cases = json.loads((FIXTURES / f"{golden}_tokenizer_golden.json").read_text())
    assert len(cases) == 1000
    for text, parse_special, ids in cases:
        assert theirs(text, add_special_tokens=False, split_special_tokens=not parse_special).input_ids == ids, text
    assert_same_on_new_texts(theirs, own)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (own.bos_token_id, own.eos_token_id)
    assert (theirs.pad_token, theirs.unk_token, theirs.model_max_length) == (pad, unknown, 512)
    assert theirs.chat_template == own.chat_template
    if own.chat_template is not None:
        assert_same_conversation(theirs, own)


def assert_same_on_new_texts(theirs: Any, own: Tokenizer) -> None:
    """A thousand."""
    rng = random.Random(7)
    texts = [random_text(rng) + random_text(rng) for _ in range(500)]
    texts += ["".join(rng.choice("ab nA.\n<>/'") for _ in range(40)) for _ in range(500)]
    for text in texts:
        ids = own.encode(text, parse_special=True)
        if not (own.adds_bos and text.startswith("<bos>")):  # theirs puts its own before it all the same
            assert theirs(text).input_ids == ids, text
        assert theirs.decode(ids, skip_special_tokens=True) == own.decode(ids), text


def assert_same_conversation(theirs: Any, own: Tokenizer) -> None:
    for start in (True, False):
        want = render_chat(own, MESSAGES, add_generation_prompt=start)
        assert theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=start) == want
        ids = theirs.apply_chat_template(MESSAGES, add_generation_prompt=start)["input_ids"]
        assert ids == own.encode(want, parse_special=True)


@pytest.mark.parametrize("prefix", [True, False])
def test_a_small_sentencepiece_file(tmp_path: Path, own_cache: Path, prefix: bool) -> None:
    tokens, types = list(SPM_TOKENS), list(SPM_TYPES)
    if prefix:  # tokens that are literal text have no form beside a prefix
        types = [1 if kind == 4 else kind for kind in types]
        tokens[tokens.index("  ")] = "\u2581\u2581"
    keys = {
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
    }
    theirs, own = export(ModelSource("gguf", spm_file(tmp_path, keys), "spm"), tmp_path / "out")
    assert_same(theirs, own, ["ab a", " a  b", "", "<x>ab<x>   <x>", "a</s>b", "<s>", "é🎉", "aab\0b", "    a"])
    assert theirs("ab").input_ids == own.encode("ab") and own.adds_bos
    assert theirs("ab", "a").input_ids == own.encode("ab") + own.encode("a")


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_a_small_byte_pair_file(tmp_path: Path, pre: str) -> None:
    path = bpe_file(tmp_path, {"tokenizer.ggml.pre": pre}, words=["the", "then", "\u0120a", "12"])
    theirs, own = export(ModelSource("gguf", path, "bpe"), tmp_path / "out", "{{ messages[0].content }}")
    assert_same(theirs, own, ["the then", " a 1212", "x<think>y<|end|>", "é\r\n\n", "don't"])
    assert theirs("then").input_ids == own.encode("then")
    assert theirs.apply_chat_template(MESSAGES, tokenize=False) == "Be brief."


def test_a_folder_s_tokenizer_is_kept_as_it_is(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "<end>", "chat_template": "{{ bos_token }}", "auto_map": {}}
    folder = byte_level_folder(tmp_path / "m", config)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    source = ModelSource("folder", folder, "m")
    theirs, own = export(source, tmp_path / "out")
    assert_same(theirs, own, ["a", "<s>b<end>", "<tool> é"])
    assert theirs("a").input_ids == own.encode("a") and theirs.bos_token == "<s>" and theirs.eos_token == "<end>"
    files = tokenizer_files(source, 9)
    assert tuple(files) == FILES and files["tokenizer.json"] == (folder / "tokenizer.json").read_text()
    written = json.loads(files["tokenizer_config.json"])
    assert (written["chat_template"], written["model_max_length"]) == ("{{ bos_token }}", 9)
    assert "auto_map" not in written  # nobody is asked to run code
    assert json.loads(files["config.json"])["model_type"] == "qwen2"


def test_what_would_give_other_ids_is_refused(tmp_path: Path, own_cache: Path) -> None:
    literal_and_prefix = spm_file(tmp_path, {"tokenizer.ggml.add_space_prefix": True})
    with pytest.raises(ModelError, match=r"as tokenizer\.json it would give .* the model's own are"):
        tokenizer_files(ModelSource("gguf", literal_and_prefix, "spm"), 512)
    types = np.array([5 if token == "ab" else kind for token, kind in zip(SPM_TOKENS, SPM_TYPES, strict=True)])
    unused = spm_file(tmp_path, {"tokenizer.ggml.token_type": types.astype(np.int32)})
    with pytest.raises(ModelError, match="unused or repeated pieces"):
        tokenizer_files(ModelSource("gguf", unused, "spm"), 512)
