"""What crosses between the engine core and whoever talks to it: ids and numbers, serialisable.

Text stays outside: tokenizing, templates, detokenizing and stop strings live in front of the core,
so that the core can be a thread or a process.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from sash.spec.sampling import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Start a request. ``answer_ids`` names its n answers, each with its own seed in ``seeds``;
    ``stop_token_ids`` are all tokens that end an answer."""

    answer_ids: tuple[str, ...]
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seeds: tuple[int, ...]
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """End one answer, whatever its state; unknown ids are ignored."""

    answer_id: str


@dataclass(frozen=True, slots=True)
class Update:
    """News of one answer after a step.

    ``token_ids`` and ``logprobs`` are new since the last update; ``prompt_logprobs`` comes once,
    with the first token, and has None for the first prompt token. ``finish_reason`` is stop,
    length, timeout, cancelled or error; ``error`` says what went wrong. ``draft_tokens`` were guessed
    and checked so far, of them ``accepted_tokens`` were right. Times are seconds of a monotonic clock.
    """

    answer_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: str | None = None
    error: str | None = None
    computed_tokens: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    scheduled_at_s: float | None = None


Message = AddRequest | CancelRequest | Update
_KINDS: dict[str, type] = {cls.__name__: cls for cls in (AddRequest, CancelRequest, Update)}


def encode(message: Message) -> bytes:
    """A message as UTF-8 JSON."""
    body = asdict(message)
    if isinstance(message, AddRequest):
        # JSON has no integer keys.
        body["params"]["logit_bias"] = list(message.params.logit_bias.items())
    return json.dumps([type(message).__name__, body]).encode()


def decode(data: bytes) -> Message:
    """The message that ``encode`` wrote.

    Raises:
        ValueError: not such a message.
    """
    try:
        kind, body = json.loads(data)
        return _make(kind, body)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a message: {error}") from error


def _make(kind: str, body: dict[str, Any]) -> Message:
    if kind not in _KINDS:
        raise ValueError(f"unknown message {kind!r}")
    if kind == "CancelRequest":
        return CancelRequest(**body)
    if kind == "AddRequest":
        params = dict(body.pop("params"))
        params["logit_bias"] = dict(params["logit_bias"])
        return AddRequest(params=SamplingParams(**params), **{k: tuple(v) for k, v in body.items()})
    prompt = body.pop("prompt_logprobs")
    return Update(
        token_ids=tuple(body.pop("token_ids")),
        logprobs=tuple(_logprobs(x) for x in body.pop("logprobs")),
        prompt_logprobs=None if prompt is None else tuple(x and _logprobs(x) for x in prompt),
        **body,
    )


def _logprobs(body: dict[str, Any]) -> TokenLogprobs:
    top_ids, top_logprobs = tuple(body.pop("top_ids")), tuple(body.pop("top_logprobs"))
    return TokenLogprobs(**body, top_ids=top_ids, top_logprobs=top_logprobs)
