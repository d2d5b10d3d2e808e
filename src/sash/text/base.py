"""What every tokenizer offers, and the two rules they share: how bytes become text, and one BOS at most."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from sash.spec.errors import RequestError

# Stands for a space in the pieces of SentencePiece and of tokenizers made like it.
SPACE = "\u2581"
# Tokens whose bytes a tokenizer remembers.
CACHED_TOKENS = 1 << 16


class Tokenizer(Protocol):
    """Text to token ids and back.

    ``special_ids`` are control tokens: matched in text only with ``parse_special``, left out of it by
    ``skip_special``. ``adds_bos``: a text starts with ``bos_token_id``. ``strips_space``: the first space of a decoded
    text was put there by the tokenizer. ``chat_template`` is jinja source.
    """

    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    chat_template: str | None
    special_ids: frozenset[int]
    adds_bos: bool
    strips_space: bool

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of ``text``; ``add_bos`` adds the model's BOS where it has one and the text doesn't start with it.

        Raises RequestError for text that isn't Unicode (lone surrogates).
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ``ids``; bytes that are no UTF-8 become U+FFFD. Ids outside the vocabulary have no text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token stands for, maybe part of a character; b"" outside the vocabulary."""
        ...


def decode_bytes(tokenizer: Tokenizer, ids: Iterable[int], *, skip_special: bool) -> str:
    """``Tokenizer.decode`` through ``token_bytes``."""
    skipped = tokenizer.special_ids if skip_special else frozenset()
    text = b"".join(tokenizer.token_bytes(i) for i in ids if i not in skipped).decode("utf-8", errors="replace")
    return text[1:] if tokenizer.strips_space and text.startswith(" ") else text


def check_text(text: str) -> None:
    """Raises RequestError for a string that has no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has a lone surrogate at character {error.start}; give valid Unicode (decode bytes as UTF-8)"
        ) from error


def with_bos(ids: list[int], bos: int | None) -> list[int]:
    """``ids`` behind one BOS: a text that spells it out does not get a second."""
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


class SpecialSplitter:
    """Cuts text at special tokens: the leftmost first, the longest of those that start there.

    A dictionary per length under each first character, because thousands of alternatives make a slow regular
    expression.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = {text: i for text, i in tokens.items() if text}
        lengths: dict[str, set[int]] = {}
        for text in self._tokens:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        self._starts = re.compile("[" + re.escape("".join(self._lengths)) + "]") if lengths else None

    def split(self, text: str) -> Iterator[str | int]:
        """Pieces of plain text (never empty) and token ids, in order."""
        start = pos = 0
        while self._starts and (found := self._starts.search(text, pos)):
            pos = found.start()
            for size in self._lengths[text[pos]]:
                token = self._tokens.get(text[pos : pos + size])
                if token is not None:
                    if pos > start:
                        yield text[start:pos]
                    yield token
                    start = pos = pos + size
                    break
            else:
                pos += 1
        if start < len(text):
            yield text[start:]
