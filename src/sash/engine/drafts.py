"""Drafts by prompt lookup: what followed the last tokens when they stood in this text before. Without torch.

Prompt lookup decoding (Saxena, 2023; ``ngram`` in vLLM): text that repeats itself, such as code, tables, quotations and
summaries, is guessed by copying. A guess costs a row of a step; one that turns out right saves a step.
"""

from __future__ import annotations

from array import array

# Places with the same n-gram that a lookup compares, the latest first.
_PLACES = 16
# Steps without a draft after one that was all wrong: doubled each time, up to the last.
_FIRST_PAUSE, _LAST_PAUSE = 2, 64


class PromptLookup:
    """Guesses the next tokens of one answer.

    The index chains the places where each n-gram of ``shortest`` tokens ends, the latest first, and
    grows with the text: a lookup compares a fixed number of places, whatever the length of the text.

    How many tokens are guessed follows what became of the guesses before: twice as many after a
    draft that was all right, one more than were right otherwise, none for a while after a draft
    that was all wrong.

    Args:
        num_tokens: most tokens of a draft.
        longest: tokens before the draft that are compared at most; a longer match is preferred.
        shortest: tokens that must match at least.
    """

    __slots__ = ("_indexed", "_last", "_length", "_longest", "_num_tokens", "_pause", "_previous", "_shortest", "_wait")

    def __init__(self, num_tokens: int, longest: int, shortest: int) -> None:
        self._num_tokens, self._longest, self._shortest = num_tokens, longest, shortest
        self._last: dict[tuple[int, ...], int] = {}  # n-gram to the place after its last occurrence
        self._previous = array("i")  # place to the place before it with the same n-gram, or 0
        self._indexed = 0  # places up to here are in the index
        self._length = num_tokens
        self._pause, self._wait = _FIRST_PAUSE, 0

    def propose(self, tokens: list[int]) -> list[int]:
        """The draft that follows ``tokens``, the text so far; empty where nothing like its end stood before."""
        if self._wait:
            self._wait -= 1
            return []
        place = self._find(tokens)
        if place is None:
            return []
        draft = tokens[place : place + self._length]
        # A copy that reaches the end of the text goes on with itself: the text has a period.
        period = len(tokens) - place
        while len(draft) < self._length:
            draft.append(draft[-period])
        return draft

    def settle(self, proposed: int, accepted: int) -> None:
        """Of ``proposed`` tokens that were checked the first ``accepted`` were right."""
        if accepted == proposed:
            self._length = min(2 * self._length, self._num_tokens)
        else:
            self._length = min(accepted + 1, self._num_tokens)
        if accepted:
            self._pause = _FIRST_PAUSE
        else:
            self._wait = self._pause
            self._pause = min(2 * self._pause, _LAST_PAUSE)

    def _find(self, tokens: list[int]) -> int | None:
        """The place after the longest, then latest, match of the end of ``tokens``; None where there is none."""
        size, end = self._shortest, len(tokens)
        if end <= size:
            return None
        self._extend(tokens)
        place = self._last.get(tuple(tokens[end - size :]), 0)
        best, found = 0, None
        for _ in range(_PLACES):
            if not place:
                break
            match = self._matching(tokens, place)
            if match > best:
                best, found = match, place
            if best == self._longest:
                break
            place = self._previous[place]
        return found

    def _extend(self, tokens: list[int]) -> None:
        """Index every place before the end of the text: the end itself would match itself."""
        size, last, previous = self._shortest, self._last, self._previous
        start = max(self._indexed + 1, size)
        previous.extend([0] * (len(tokens) - len(previous)))
        for place in range(start, len(tokens)):
            key = tuple(tokens[place - size : place])
            previous[place] = last.get(key, 0)
            last[key] = place
        self._indexed = len(tokens) - 1

    def _matching(self, tokens: list[int], place: int) -> int:
        """How many tokens before ``place`` equal those at the end, at most ``longest``."""
        end, count = len(tokens), self._shortest
        limit = min(self._longest, place)
        while count < limit and tokens[place - 1 - count] == tokens[end - 1 - count]:
            count += 1
        return count
