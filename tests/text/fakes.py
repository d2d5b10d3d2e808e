"""A tokenizer whose tokens are given bytes."""

from __future__ import annotations

from collections.abc import Sequence

from sash.text.base import decode_bytes


class ByteTokenizer:
    """Token i is byte i; the tokens after 255 are ``extra``, of which ``special`` are control tokens."""

    def __init__(
        self,
        extra: Sequence[bytes] = (),
        special: Sequence[int] = (),
        *,
        strips_space: bool = False,
        bos: int | None = None,
    ) -> None:
        self._table = [bytes((b,)) for b in range(256)] + list(extra)
        self.vocab_size = len(self._table)
        self.bos_token_id, self.eos_token_id = bos, None
        self.chat_template: str | None = None
        self.special_ids = frozenset(special)
        self.adds_bos = bos is not None
        self.strips_space = strips_space

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return decode_bytes(self, ids, skip_special=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        return self._table[token_id] if 0 <= token_id < len(self._table) else b""
