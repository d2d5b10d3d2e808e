"""The benchmarks' text: Python's own help topics, which every Python brings along."""

from __future__ import annotations

from sash.text.base import Tokenizer

# More than any tokenizer needs for a token of this text, so that the cut lies behind what is used.
_CHARACTERS_PER_TOKEN = 8


def topics_ids(tokenizer: Tokenizer, length: int) -> list[int]:
    """Token ids [length] of the topics in order of their names, an empty line between them; repeated as needed.

    Under CPython 3.11 the first 8192 for Gemma 3 are those of docs/benchmarks.md's perplexities.
    """
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer.encode(text[: _CHARACTERS_PER_TOKEN * length])
    while len(ids) < length:
        ids += ids
    return ids[:length]
