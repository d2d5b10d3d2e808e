"""Tokenizers that the ``tokenizers`` library runs: a folder's tokenizer.json, and byte-pair encoding out of GGUF."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import tokenizers

from sash.spec.errors import ModelError
from sash.text.base import CACHED_TOKENS, SPACE, check_text, decode_bytes, with_bos


class FastTokenizer:
    """A ``Tokenizer`` over ``tokenizers.Tokenizer``.

    Args:
        inner: the tokenizer; its decoder decides which bytes a token stands for.
        bos_token: text of the BOS token, or None.
        eos_token: text of the EOS token, or None.
        chat_template: jinja source, or None.
        add_bos: BOS goes before every text; None: as the tokenizer's own post-processor does.
        source: file or folder, named in errors.

    Raises:
        ModelError: a decoder whose tokens have no bytes of their own (WordPiece, CTC), or a BOS or EOS that isn't in
            the vocabulary.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        chat_template: str | None = None,
        add_bos: bool | None = None,
        source: str = "the tokenizer",
    ) -> None:
        self._inner, self._source = inner, source
        self._lock = threading.Lock()
        self._added = dict(inner.get_added_tokens_decoder().items())
        self.vocab_size = 1 + max(inner.get_vocab(with_added_tokens=True).values(), default=-1)
        self.bos_token_id, self.eos_token_id = self._id(bos_token), self._id(eos_token)
        self.chat_template = chat_template
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self._own_bos = add_bos is None
        starts_with = inner.encode("", add_special_tokens=True).ids[:1]
        self.adds_bos = self.bos_token_id is not None and (
            starts_with == [self.bos_token_id] if add_bos is None else add_bos
        )
        self._bytes_of, self.strips_space = _piece_decoder(inner, source)
        self._cached_bytes = lru_cache(CACHED_TOKENS)(self._spelled_bytes)

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        """See ``Tokenizer.encode``."""
        check_text(text)
        # The post-processor would add a second BOS to a text that spells the first one out.
        spelled = parse_special and self.bos_token_id is not None and text.startswith(self._text(self.bos_token_id))
        with self._lock:  # the flag is the tokenizer's, not the call's
            self._inner.encode_special_tokens = not parse_special
            ids: list[int] = self._inner.encode(text, add_special_tokens=add_bos and self._own_bos and not spelled).ids
        return with_bos(ids, self.bos_token_id if add_bos and self.adds_bos else None)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """See ``Tokenizer.decode``."""
        return decode_bytes(self, ids, skip_special=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """See ``Tokenizer.token_bytes``."""
        return self._cached_bytes(token_id)

    def _spelled_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._text(token_id).encode()
        piece = self._inner.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return self._bytes_of(piece) if piece is not None else b""

    def copy_of_inner(self) -> tokenizers.Tokenizer:
        """The library's tokenizer, a copy to change."""
        return tokenizers.Tokenizer.from_str(self._inner.to_str())

    def _text(self, token_id: int) -> str:
        added = self._added.get(token_id)
        content: str = added.content if added is not None else self._inner.id_to_token(token_id) or ""
        return content

    def _id(self, token: str | None) -> int | None:
        if token is None:
            return None
        found: int | None = self._inner.token_to_id(token)
        if found is None:
            raise ModelError(f"{self._source}: token {token!r} is named as BOS or EOS but isn't in the vocabulary")
        return found


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2) to that byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


def _piece_decoder(inner: tokenizers.Tokenizer, source: str) -> tuple[Callable[[str], bytes], bool]:
    """How a vocabulary entry spells its bytes, and whether decoding drops the first space."""
    decoder: dict[str, Any] | None = json.loads(inner.decoder.__getstate__()) if inner.decoder else None
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        alphabet = byte_alphabet()
        return lambda piece: b"".join(bytes((alphabet[c],)) if c in alphabet else c.encode() for c in piece), False
    if not kinds:  # the library joins such tokens with spaces
        return lambda piece: b" " + piece.encode(), True
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and kinds & {"Replace", "Metaspace"}:
        strips = any(
            step.get("start", 0) > 0 if step["type"] == "Strip" else step.get("prepend_scheme", "never") != "never"
            for step in steps
        )
        return _sentencepiece_bytes(fallback="ByteFallback" in kinds), strips
    raise ModelError(
        f"{source}: decoder {' + '.join(sorted(kinds))} isn't supported; byte-level and SentencePiece-like "
        f"(Metaspace, or Replace with ByteFallback) decoders are"
    )


def _sentencepiece_bytes(*, fallback: bool) -> Callable[[str], bytes]:
    byte_tokens = {f"<0x{b:02X}>": bytes((b,)) for b in range(256)} if fallback else {}

    def bytes_of(piece: str) -> bytes:
        return byte_tokens.get(piece) or piece.replace(SPACE, " ").encode()

    return bytes_of
