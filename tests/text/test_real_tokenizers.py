"""Tokenizers of the real models against golden ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.real_models import real_model

from sash.text import spm
from sash.text.base import Tokenizer
from sash.text.load import load_tokenizer

FIXTURES = Path(__file__).parents[1] / "fixtures"
HEX_A = [236820, 236771, 236781, 236812, 236770, 236813]
# facts about the file: text, ids without BOS
GEMMA_VECTORS = [
    ("Hello world", [9259, 1902]),
    (" Hello", [26352]),
    ("a  b and    c", [236746, 138, 236763, 532, 140, 236755]),
    ("x\n\n\ny", [236781, 109, 236762]),
    ("\t\tif", [255969, 584]),
    ("\n" * 40, [137, 115]),
    (" " * 40, [167, 145]),
    ("<table>", [168]),
    ("a</s>b", [236746, 212, 236763]),
    ("[multimodal]", [5]),
    ("<0x41>", HEX_A),
    ("\0", [238]),
    ("\u2581a", [496]),
    (" a", [496]),
    ("", []),
]


@pytest.fixture(scope="session")
def gemma() -> Tokenizer:
    return load_tokenizer(real_model("gemma3-270m"))


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    return load_tokenizer(real_model("smollm2-135m"))


@pytest.mark.real
@pytest.mark.parametrize(("text", "ids"), GEMMA_VECTORS, ids=[repr(t)[:20] for t, _ in GEMMA_VECTORS])
def test_gemma_golden_vectors(gemma: Tokenizer, text: str, ids: list[int]) -> None:
    assert gemma.encode(text) == [2, *ids]
    assert gemma.encode(text, add_bos=False) == ids
    assert gemma.decode([2, *ids]) == text.replace("\u2581", " ")


@pytest.mark.real
def test_gemma_emoji_then_a_word(gemma: Tokenizer) -> None:
    assert gemma.encode("😊 Café", add_bos=False) == [240782, 62367]


@pytest.mark.real
def test_gemma_control_tokens_are_text_unless_parsed(gemma: Tokenizer) -> None:
    text = "<start_of_turn>user\nhi<end_of_turn>"
    assert gemma.encode(text, parse_special=True) == [2, 105, 2364, 107, 2202, 106]
    plain = gemma.encode(text)
    assert not {105, 106} & set(plain)
    assert gemma.decode(plain) == text
    assert gemma.decode([2, 105, 2364, 106]) == "user"
    assert gemma.decode([2, 105, 2364, 106], skip_special=False) == "<bos><start_of_turn>user<end_of_turn>"


@pytest.mark.real
def test_gemma_has_one_bos_when_the_text_spells_it(gemma: Tokenizer) -> None:
    assert gemma.encode("<bos>hi", parse_special=True) == [2, 2202]
    assert gemma.encode("<bos>hi", parse_special=True, add_bos=False) == [2, 2202]
    assert gemma.encode("<bos>hi") == [2, 236820, 46757, 236813, 2202]


@pytest.mark.real
def test_gemma_properties(gemma: Tokenizer) -> None:
    assert (gemma.vocab_size, gemma.bos_token_id, gemma.eos_token_id) == (262144, 2, 1)
    assert (gemma.chat_template, gemma.adds_bos, gemma.strips_space) == (None, True, False)
    assert len(gemma.special_ids) == 6249
    assert {0, 1, 2, 3, 105, 106} <= gemma.special_ids
    assert not {5, 107, 138, 168, 212, 238} & gemma.special_ids
    assert [gemma.token_bytes(i) for i in (238, 496, 138, -1, 262144)] == [b"\0", b" a", b"  ", b"", b""]


@pytest.mark.real
@pytest.mark.parametrize("name", ["gemma", "smollm2"])
def test_a_thousand_random_texts_encode_like_the_reference(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    cases = json.loads((FIXTURES / f"{name}_tokenizer_golden.json").read_text())
    assert len(cases) == 1000
    wrong = [
        (text, parse_special, ids, got)
        for text, parse_special, ids in cases
        if (got := tokenizer.encode(text, add_bos=False, parse_special=parse_special)) != ids
    ]
    assert wrong == []
    known = set(b"".join(tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)))  # SmolLM2 lacks 21 bytes
    whole = [case for case in cases if set(case[0].encode()) <= known]
    assert len(whole) > 700
    for text, _, ids in whole:
        decoded = tokenizer.decode(ids, skip_special=False)
        assert decoded == (text.replace("\u2581", " ") if name == "gemma" else text)


@pytest.mark.real
def test_smollm2(smollm2: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_id, smollm2.adds_bos) == (49152, 1, 2, False)
    assert smollm2.chat_template is not None and "<|im_start|>" in smollm2.chat_template
    assert smollm2.encode("Hello 12345 world") == [19556, 216, 33, 34, 35, 36, 37, 905]
    assert smollm2.encode("<|im_start|>user", parse_special=True) == [1, 4093]
    assert 1 not in smollm2.encode("<|im_start|>user")


@pytest.mark.real
def test_gemma_is_built_once_and_then_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = real_model("gemma3-270m")
    monkeypatch.setenv("SASH_CACHE_DIR", str(tmp_path))
    first = load_tokenizer(path)
    monkeypatch.setattr(spm, "_model_bytes", lambda header: pytest.fail("built again"))
    second = load_tokenizer(path)
    assert second.encode("Hello world") == first.encode("Hello world") == [2, 9259, 1902]
