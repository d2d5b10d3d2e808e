"""The GGUF "llama" tokenizer: SentencePiece merges by score, rebuilt as a model that ``sentencepiece`` loads.

Model format: github.com/google/sentencepiece, src/sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b

import sentencepiece

from sash.spec.errors import ModelError
from sash.spec.ggml import TokenType
from sash.spec.gguf import GgufHeader
from sash.text.base import CACHED_TOKENS, SPACE, SpecialSplitter, check_text, decode_bytes, with_bos
from sash.text.cache import cached

# Names of this module, as loops over a whole vocabulary look them up.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = TokenType
ARRAYS = ("tokens", "scores", "token_type")
# Leads a piece whose own text can't stand in the model (empty, or there twice); its id follows, then the text.
ALIAS = "\uf8ff"


class SentencePieceTokenizer:
    """A ``Tokenizer`` over a GGUF file's tokens, scores and types.

    Tokens marked user-defined are literal text, cut out before anything merges; control tokens are text unless
    ``parse_special``; characters without a token become byte tokens.
    """

    def __init__(self, header: GgufHeader) -> None:
        self._types = bytes(piece_types(header))
        self.vocab_size = len(self._types)
        self.bos_token_id: int | None = header.get("tokenizer.ggml.bos_token_id")
        self.eos_token_id: int | None = header.get("tokenizer.ggml.eos_token_id")
        self.chat_template: str | None = header.get("tokenizer.chat_template")
        self.adds_bos = bool(header.get("tokenizer.ggml.add_bos_token", True)) and self.bos_token_id is not None
        self.strips_space = bool(header.get("tokenizer.ggml.add_space_prefix", True))
        self.special_ids = frozenset(i for i, kind in enumerate(self._types) if kind in (UNKNOWN, CONTROL))
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(cached("spm", _key(header), lambda: _model_bytes(header)))
        except RuntimeError as error:
            raise ModelError(f"{header.path}: its tokenizer.ggml vocabulary makes no tokenizer ({error})") from error
        self._cached_bytes = lru_cache(CACHED_TOKENS)(self._spelled_bytes)
        self._specials = SpecialSplitter({self._piece(i): i for i in self.special_ids})

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        """See ``Tokenizer.encode``."""
        check_text(text)
        ids: list[int] = []
        for piece in self._specials.split(text) if parse_special else (text,):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._model.EncodeAsIds(piece)
        return with_bos(ids, self.bos_token_id if add_bos and self.adds_bos else None)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """See ``Tokenizer.decode``."""
        return decode_bytes(self, ids, skip_special=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """See ``Tokenizer.token_bytes``."""
        return self._cached_bytes(token_id)

    def _spelled_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            return b""
        piece = self._piece(token_id)
        if self._types[token_id] == BYTE:
            return bytes((int(piece[3:5], 16),))
        return piece.replace(SPACE, " ").encode()

    def _piece(self, token_id: int) -> str:
        piece: str = self._model.IdToPiece(token_id)
        return piece.removeprefix(f"{ALIAS}{token_id}{ALIAS}")


def piece_types(header: GgufHeader) -> list[int]:
    """Token types with the unknown token marked as one, which the model needs exactly once."""
    missing = [f"tokenizer.ggml.{name}" for name in ARRAYS if f"tokenizer.ggml.{name}" not in header]
    if missing:
        raise ModelError(f"{header.path} has no {', '.join(missing)}; use a file made with its tokenizer")
    types: list[int] = list(header["tokenizer.ggml.token_type"])
    unknown = header.get("tokenizer.ggml.unknown_token_id")
    if unknown is None:
        unknown = types.index(UNKNOWN) if UNKNOWN in types else 0
    if not 0 <= unknown < len(types) or not all(NORMAL <= kind <= BYTE for kind in types):
        raise ModelError(f"{header.path}: tokenizer.ggml.token_type or unknown_token_id is out of range")
    types = [CONTROL if kind == UNKNOWN else kind for kind in types]
    types[unknown] = UNKNOWN
    return types


def _key(header: GgufHeader) -> str:
    """Digest of everything the model is built from, over stored bytes: nothing is decoded for it."""
    digest = blake2b(b"1", digest_size=16)  # the number changes when _model_bytes does
    for name in ARRAYS:
        raw = header.raw(f"tokenizer.ggml.{name}")
        part = raw if raw is not None else repr(header[f"tokenizer.ggml.{name}"]).encode()
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    options = [header.get(f"tokenizer.ggml.{name}") for name in ("unknown_token_id", "add_space_prefix")]
    digest.update(repr(options).encode())
    return digest.hexdigest()


def _model_bytes(header: GgufHeader) -> bytes:
    """A serialised ModelProto: pieces, a BPE trainer with byte fallback, a normaliser that only escapes spaces."""
    tokens, scores, types = header["tokenizer.ggml.tokens"], header["tokenizer.ggml.scores"], piece_types(header)
    if not len(tokens) == len(scores) == len(types):
        raise ModelError(f"{header.path}: tokenizer.ggml.{', .'.join(ARRAYS)} differ in length")
    parts = list(_pieces(tokens, scores, types))
    has_bytes = types.count(BYTE) == 256
    trainer = _varint_field(3, 2) + _varint_field(4, len(tokens)) + _varint_field(35, int(has_bytes))
    prefix = bool(header.get("tokenizer.ggml.add_space_prefix", True))
    # 3: a space before the text; 4: remove extra spaces; 5: write spaces as U+2581.
    normalizer = (
        _bytes_field(1, b"identity") + _varint_field(3, int(prefix)) + _varint_field(4, 0) + _varint_field(5, 1)
    )
    return b"".join((*parts, _bytes_field(2, trainer), _bytes_field(3, normalizer)))


def _pieces(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> Iterable[bytes]:
    seen: set[str] = set()
    pack = struct.Struct("<f").pack
    for i, (token, score, kind) in enumerate(zip(tokens, scores, types, strict=True)):
        # Matched after spaces are escaped, so literal spaces of user-defined tokens are escaped as well.
        piece = token.replace(" ", SPACE) if kind == USER_DEFINED else token
        if not piece or piece in seen:
            piece, kind = f"{ALIAS}{i}{ALIAS}{piece}", UNUSED if kind != UNKNOWN else kind
        seen.add(piece)
        body = _bytes_field(1, piece.encode()) + b"\x15" + pack(score) + b"\x18" + bytes((kind,))
        yield _bytes_field(1, body)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _varint_field(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _bytes_field(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data
