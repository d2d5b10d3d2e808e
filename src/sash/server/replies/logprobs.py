"""Log-probabilities in the shapes of both APIs."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from sash.engine.outputs import PositionLogprobs
from sash.server.protocol.chat import ChatLogprobs, TopLogprob
from sash.server.protocol.common import PromptLogprob, PromptLogprobs
from sash.server.protocol.completions import CompletionLogprobs
from sash.text.base import Tokenizer

# JSON has no minus infinity.
_LOWEST = -9999.0


class TokenNames:
    """How tokens are spelled in answers.

    Args:
        tokenizer: None: by their ids.
        as_ids: ``token_id:5`` instead of text, which several tokens may share.
    """

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def data(self, token: int) -> bytes:
        """The bytes that a token stands for."""
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token)

    def name(self, token: int, prefix: str = "") -> str:
        """A token's text; where it is no whole characters ``prefix`` and its bytes as escapes."""
        if self._as_ids:
            return f"token_id:{token}"
        data = self.data(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in data)


def best(position: PositionLogprobs, count: int) -> list[tuple[int, float]]:
    """The ``count`` likeliest tokens of a place and their scores, in order."""
    ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
    return [(token, max(scored.logprob, _LOWEST)) for token, scored in ranked[:count]]


def own(position: PositionLogprobs, token: int) -> float:
    """The score of the token that stands there."""
    return max(position[token].logprob, _LOWEST)


def chat_logprobs(
    names: TokenNames, tokens: Sequence[int], positions: Sequence[PositionLogprobs], count: int
) -> ChatLogprobs:
    """Chat's shape; ``count`` best tokens at each place."""

    def entry(token: int, score: float) -> TopLogprob:
        return {"token": names.name(token), "logprob": score, "bytes": list(names.data(token))}

    return {
        "content": [
            {
                **entry(token, own(position, token)),
                "top_logprobs": [entry(other, score) for other, score in best(position, count)],
            }
            for token, position in zip(tokens, positions, strict=True)
        ],
        "refusal": None,
    }


class CompletionScores:
    """Completions' shape, piece by piece: offsets go on from where the piece before has ended.

    Args:
        names: how tokens are spelled.
        skipped: tokens that leave no text.
        count: best tokens at each place.
    """

    def __init__(self, names: TokenNames, skipped: frozenset[int], count: int) -> None:
        self._names = names
        self._skipped = skipped
        self._count = count
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def piece(
        self, tokens: Sequence[int], positions: Sequence[PositionLogprobs | None], *, strip: bool = False
    ) -> CompletionLogprobs:
        """The next tokens. ``strip``: they begin a text whose first space is dropped."""
        out: CompletionLogprobs = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token, position in zip(tokens, positions, strict=True):
            out["text_offset"].append(self._offset)
            out["tokens"].append(self._name(token))
            out["token_logprobs"].append(None if position is None else own(position, token))
            out["top_logprobs"].append(None if position is None else self._best(position, token))
            if token not in self._skipped:
                text = self._utf8.decode(self._names.data(token))
                self._offset += len(text) - (strip and text.startswith(" "))
                strip = strip and not text
        return out

    def _name(self, token: int) -> str:
        return self._names.name(token, "bytes:")

    def _best(self, position: PositionLogprobs, token: int) -> dict[str, float]:
        scores: dict[str, float] = {}
        for other, score in [*best(position, self._count), (token, own(position, token))]:
            scores.setdefault(self._name(other), score)
        return scores


def prompt_logprobs(names: TokenNames, positions: Sequence[PositionLogprobs | None] | None) -> PromptLogprobs | None:
    """The prompt's scores by token id."""
    if positions is None:
        return None
    return [None if position is None else _by_id(names, position) for position in positions]


def _by_id(names: TokenNames, position: PositionLogprobs) -> dict[str, PromptLogprob]:
    return {
        str(token): {"logprob": max(scored.logprob, _LOWEST), "rank": scored.rank, "decoded_token": names.name(token)}
        for token, scored in position.items()
    }
