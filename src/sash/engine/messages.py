"""What crosses between the engine core and whoever talks to it: ids and numbers, serialisable.

Text stays outside: tokenizing, templates, detokenizing and stop strings live in front of the core,
so that the core can be a thread or a process. Between processes messages travel as msgpack, a list of them
in each frame (``sash.engine.wire``).
"""

from __future__ import annotations

from typing import Any

import msgspec

from sash.engine.report import EngineReport
from sash.spec.sampling import SamplingParams, TokenLogprobs


class AddRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Start a request. ``answer_ids`` names its n answers, each with its own seed in ``seeds``;
    ``stop_token_ids`` are all tokens that end an answer."""

    answer_ids: tuple[str, ...]
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seeds: tuple[int, ...]
    stop_token_ids: tuple[int, ...] = ()


class CancelRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End one answer, whatever its state; unknown ids are ignored."""

    answer_id: str


class Update(msgspec.Struct, frozen=True, tag=True, array_like=True):
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


class Start(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first message to a core process: load this model with these options of ``EngineConfig``."""

    model: str
    options: dict[str, Any]


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The core has loaded and takes requests."""

    max_model_len: int
    max_num_seqs: int
    dtype: str
    quantization: str
    pool_line: str


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The core can't go on. ``kind`` is the name of the error's class: a ConfigError or ModelError of the start is
    the user's to mend, everything else is a defect."""

    kind: str
    error: str


class Accepted(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request is queued; updates follow. ``answer_id`` is its first."""

    answer_id: str


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request can never run; nothing of it was started. ``answer_id`` is its first."""

    answer_id: str
    error: str


class GetReport(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask for a report, with or without what stands on every page; the answer bears the same number."""

    number: int
    page_maps: bool = False


class Report(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine as it is between two steps."""

    number: int
    report: EngineReport


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End the core process at once."""


ToCore = Start | AddRequest | CancelRequest | GetReport | Stop
FromCore = Ready | Failed | Accepted | Refused | Update | Report
Message = ToCore | FromCore

_decoder = msgspec.msgpack.Decoder(list[Message])
_encoder = msgspec.msgpack.Encoder()


def encode(messages: list[Message]) -> bytes:
    """Messages as msgpack."""
    return _encoder.encode(messages)


def decode(data: bytes | bytearray | memoryview) -> list[Message]:
    """The messages that ``encode`` wrote.

    Raises:
        ValueError: they are none.
    """
    return _decoder.decode(data)
