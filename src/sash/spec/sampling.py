"""SamplingParams: what a request wants of the sampler. Names follow vLLM so that users can move over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from sash.spec.errors import RequestError
from sash.spec.structured import StructuredOutputs, structured_from

MAX_LOGPROBS = 100
MAX_ANSWERS = 1024
_MASK64 = (1 << 64) - 1
# Beyond this a float32 logit may overflow.
MAX_NUMBER = 1e30


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a request ends.

    Args:
        n: number of answers to the prompt, at most 1024.
        temperature: 0 is greedy; else logits are divided by it.
        top_k: keep the k best tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of best tokens whose probability reaches it, in (0, 1].
        min_p: drop tokens below min_p times the best token's probability, in [0, 1].
        repetition_penalty: above 1 discourages tokens of prompt and answer (CTRL, arXiv 1909.05858).
        presence_penalty: subtracted once from each token of the answer, in [-2, 2].
        frequency_penalty: subtracted per occurrence in the answer, in [-2, 2].
        logit_bias: token id to a number added to its logit.
        allowed_token_ids: only these may be chosen.
        bad_token_ids: these may never be chosen.
        stop: strings that end the answer; they are not part of it.
        stop_token_ids: token ids that end the answer.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: the model's own end tokens do not end the answer.
        min_tokens: no end before so many tokens; their text is not searched for stop strings.
        max_tokens: end after so many; None: as many as the context has room for; 0 only with
            prompt_logprobs (scoring).
        seed: makes the answer repeatable whatever else runs, any integer (kept modulo 2^64);
            None draws from the engine's seed.
        logprobs: for each answer token, the log-probabilities of this many best tokens and its own.
        prompt_logprobs: the same for each prompt token but the first.
        skip_special_tokens: leave control tokens out of the text.
        structured_outputs: a form that the answer must have (or a mapping of its fields). Control tokens can't be
            part of it, it ends with "stop" when nothing may follow, and no drafts are made.

    ``stop``, ``stop_token_ids``, ``bad_token_ids`` and ``logit_bias`` take None for nothing.

    Raises:
        RequestError: a value of another type or out of range; the message names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_token_ids: Sequence[int] = ()
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        for names, convert in _TYPES.items():
            for name in names:
                object.__setattr__(self, name, convert(name, getattr(self, name)))
        object.__setattr__(self, "structured_outputs", structured_from(self.structured_outputs))
        for name, good, want in self._rules():
            if not good:
                raise RequestError(f"{name} must be {want}, got {getattr(self, name)!r}")
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        if self.seed is not None:
            object.__setattr__(self, "seed", self.seed & _MASK64)

    def _rules(self) -> list[tuple[str, bool, str]]:
        allowed, biases = self.allowed_token_ids, self.logit_bias
        return [
            ("n", 1 <= self.n <= MAX_ANSWERS, f"1 to {MAX_ANSWERS}"),
            ("temperature", 0 <= self.temperature <= MAX_NUMBER, "a finite number of 0 or more"),
            ("top_k", self.top_k >= -1, "at least 1, or 0 or -1 for all"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            (
                "repetition_penalty",
                1 / MAX_NUMBER <= self.repetition_penalty <= MAX_NUMBER,
                f"above 0 (at least {1 / MAX_NUMBER:g}) and at most {MAX_NUMBER:g}",
            ),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            (
                "logit_bias",
                all(k >= 0 and abs(v) <= MAX_NUMBER for k, v in biases.items()),
                "token ids (0 or more) to finite numbers",
            ),
            ("allowed_token_ids", allowed is None or len(allowed) > 0, "None or a non-empty list"),
            ("stop", all(self.stop), "non-empty strings"),
            ("min_tokens", self.min_tokens >= 0, "0 or more"),
            ("max_tokens", self._max_tokens_ok(), "None or at least 1 and min_tokens (0 only with prompt_logprobs)"),
            *(
                (name, value is None or 0 <= value <= MAX_LOGPROBS, f"None or 0 to {MAX_LOGPROBS}")
                for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs))
            ),
        ]

    def _max_tokens_ok(self) -> bool:
        if self.max_tokens is None:
            return True
        least = 0 if self.prompt_logprobs is not None else 1
        return self.max_tokens >= max(least, self.min_tokens)


def _wrong(name: str, want: str, value: object) -> RequestError:
    return RequestError(f"{name} must be {want}, got {value!r}")


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _wrong(name, "an integer", value)
    return int(value)


def _integer_or_none(name: str, value: object) -> int | None:
    return None if value is None else _integer(name, value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _wrong(name, "a number", value)
    try:
        return float(value)
    except OverflowError:
        raise _wrong(name, f"a number up to {MAX_NUMBER:g}", value) from None


def _flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise _wrong(name, "True or False", value)


def _ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _wrong(name, "a list of token ids", value)
    return tuple(_integer(f"each of {name}", v) for v in value)


def _ids_or_none(name: str, value: object) -> tuple[int, ...] | None:
    return None if value is None else _ids(name, value)


def _texts(name: str, value: object) -> tuple[str, ...]:
    if value is None or isinstance(value, str):
        return () if value is None else (value,)
    if isinstance(value, Iterable):
        texts = tuple(value)
        if all(isinstance(v, str) for v in texts):
            return texts
    raise _wrong(name, "a string or a list of strings", value)


def _bias(name: str, value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong(name, "a mapping of token ids to numbers", value)
    return {_integer(f"each key of {name}", k): _number(f"each value of {name}", v) for k, v in value.items()}


_TYPES: dict[tuple[str, ...], Callable[[str, Any], Any]] = {
    ("n", "top_k", "min_tokens"): _integer,
    ("max_tokens", "seed", "logprobs", "prompt_logprobs"): _integer_or_none,
    (
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ): _number,
    ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"): _flag,
    ("bad_token_ids", "stop_token_ids"): _ids,
    ("allowed_token_ids",): _ids_or_none,
    ("stop",): _texts,
    ("logit_bias",): _bias,
}


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token's own with its rank (1: most likely), and the best."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


def mix64(x: int) -> int:
    """The finaliser of SplitMix64 (Steele et al., OOPSLA 2014): any integer, folded to 64 well-mixed bits."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)
