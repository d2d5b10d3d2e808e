"""The GGUF "gpt2" tokenizer: byte-level BPE with the pre-tokenizer that ``tokenizer.ggml.pre`` names.

The file only names the rule that cuts text into words; the rules are those of the models' published tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from sash.spec.errors import ModelError
from sash.spec.ggml import TokenType
from sash.spec.gguf import GgufHeader
from sash.text.fast import FastTokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Rule:
    """How a family cuts text before merging. ``whole_words``: a word that is a token isn't merged up to it."""

    cut: Callable[[], pre_tokenizers.PreTokenizer]
    whole_words: bool = False
    nfc: bool = False


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _by_regex(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def cut() -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return cut


_LLAMA3 = Rule(_by_regex(rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"), whole_words=True)
_QWEN2 = Rule(_by_regex(rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}"), nfc=True)
RULES: Mapping[str, Rule] = {
    "gpt-2": Rule(_gpt2),
    "gpt2": Rule(_gpt2),
    "default": Rule(_gpt2),
    "smollm": Rule(_smollm),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def bpe_from_gguf(header: GgufHeader) -> FastTokenizer:
    """Build the tokenizer of a GGUF file whose ``tokenizer.ggml.model`` is gpt2.

    Raises:
        ModelError: a pre-tokenizer sash has no rule for, missing arrays, or merges that don't fit the vocabulary.
    """
    pre = header.get("tokenizer.ggml.pre", "default")
    rule = RULES.get(pre)
    if rule is None:
        raise ModelError(
            f"{header.path}: tokenizer.ggml.pre is {pre!r}; {', '.join(RULES)} are supported "
            f"(or use the model's folder with its tokenizer.json)"
        )
    missing = [f"tokenizer.ggml.{n}" for n in ("tokens", "merges", "token_type") if f"tokenizer.ggml.{n}" not in header]
    if missing:
        raise ModelError(f"{header.path} has no {', '.join(missing)}; use a file made with its tokenizer")
    tokens: list[str] = header["tokenizer.ggml.tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in header["tokenizer.ggml.merges"])]
    try:
        inner = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.whole_words))
    except Exception as error:  # the library raises no narrower type
        raise ModelError(f"{header.path}: tokenizer.ggml.merges don't fit its tokens ({error})") from error
    inner.pre_tokenizer, inner.decoder = rule.cut(), decoders.ByteLevel()
    if rule.nfc:
        inner.normalizer = normalizers.NFC()
    _mark_added(inner, tokens, header["tokenizer.ggml.token_type"])
    bos, eos = (_named_token(header, name, tokens) for name in ("bos", "eos"))
    return FastTokenizer(
        inner,
        bos_token=bos,
        eos_token=eos,
        chat_template=header.get("tokenizer.chat_template"),
        add_bos=bool(header.get("tokenizer.ggml.add_bos_token", rule is _LLAMA3)),
        source=str(header.path),
    )


def _named_token(header: GgufHeader, name: str, tokens: list[str]) -> str | None:
    token_id = header.get(f"tokenizer.ggml.{name}_token_id")
    if token_id is not None and not 0 <= token_id < len(tokens):
        raise ModelError(f"{header.path}: tokenizer.ggml.{name}_token_id is {token_id}, must be below {len(tokens)}")
    return None if token_id is None else tokens[token_id]


def _mark_added(inner: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens are special; user-defined ones are found in any text, before words are cut."""
    added = [
        AddedToken(token, special=kind == TokenType.CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED) and token
    ]
    inner.add_special_tokens([token for token in added if token.special])
    inner.add_tokens([token for token in added if not token.special])
