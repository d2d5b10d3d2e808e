"""What a body wants of the sampler, as ``SamplingParams``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sash.server.errors import ApiError
from sash.server.protocol.common import MAX_INT, GenerationBody
from sash.spec.errors import ConfigError, RequestError
from sash.spec.load import read_json
from sash.spec.sampling import SamplingParams
from sash.text.base import Tokenizer

_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_TAKEN = (
    *_DEFAULTED,
    "n",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "allowed_token_ids",
)


def generation_defaults(folder: Path) -> dict[str, float]:
    """Sampling values that a model's folder recommends in generation_config.json, for ``create_app``;
    none when there is no such file.

    Raises:
        ConfigError: a value that can't be used.
    """
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    given = read_json(file)
    found: dict[str, Any] = {name: given[name] for name in _DEFAULTED if given.get(name) is not None}
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise ConfigError(f"{file}: {error}") from error
    return found


def sampling_params(
    body: GenerationBody, defaults: Mapping[str, float], tokenizer: Tokenizer | None, **own: Any
) -> SamplingParams:
    """The parameters of a body; ``own`` are those that each endpoint reads by itself.

    Raises:
        ApiError, RequestError: with the field.
    """
    values: dict[str, Any] = dict(defaults)
    values |= {name: value for name in _TAKEN if (value := getattr(body, name)) is not None}
    values["logit_bias"] = _bias(body.logit_bias)
    values["bad_token_ids"] = [*(body.bad_token_ids or ()), *_banned(body.bad_words, tokenizer)]
    return SamplingParams(**values, **own)


def _bias(given: Mapping[str, float] | None) -> dict[int, float]:
    out = {}
    for key, value in (given or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_INT):
            raise ApiError(400, f"logit_bias: keys must be token ids, got {key[:40]!r}", param="logit_bias")
        out[int(key)] = value
    return out


def _banned(words: list[str] | None, tokenizer: Tokenizer | None) -> list[int]:
    """Ids of words that are one token, at the start of a text and after a space."""
    out: list[int] = []
    for word in words or ():
        if tokenizer is None:
            raise ApiError(400, "bad_words needs a tokenizer; use bad_token_ids", param="bad_words")
        for spelled in (word, f" {word}"):
            ids = tokenizer.encode(spelled, add_bos=False)
            if len(ids) != 1:
                raise ApiError(
                    400,
                    f"bad_words: {spelled[:40]!r} is {len(ids)} tokens; only words of one token can be banned "
                    f"(single tokens: bad_token_ids)",
                    param="bad_words",
                )
            out += ids
    return out
