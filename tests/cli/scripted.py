"""A scripted engine behind the command line's builder: no torch, no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sash.cli.progress import Progress
from sash.spec.sampling import SamplingParams


@dataclass
class Piece:
    """One answer's part of a delta."""

    text: str
    token_ids: list[int]
    index: int = 0
    logprobs: list[object] | None = None
    finish_reason: str | None = None
    error: str | None = None


@dataclass
class Step:
    """A delta."""

    outputs: list[Piece]
    prompt_token_ids: list[int] = field(default_factory=lambda: [2, 10, 11])
    prompt_logprobs: list[object] | None = None


STATS = {
    "pools": [
        {
            **{"name": "window", "layers": 15, "page_size": 2, "page_bytes": 2**20, "num_pages": 9},
            **{"peak_pages": 2, "longest_pages": 3},
        },
        {
            **{"name": "full", "layers": 3, "page_size": 2, "page_bytes": 2**10, "num_pages": 50},
            **{"peak_pages": 3, "longest_pages": 1024},
        },
    ],
    "max_model_len": 2047,
    "uniform_peak_bytes": 4 * (2**20 + 2**10),
}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HELLO = [Step([Piece("Hel", [5])]), Step([Piece("lo", [6])]), Step([Piece("!", [7], finish_reason="stop")])]


@dataclass
class WordTokenizer:
    """Keeps the texts it was given; each character is a token."""

    chat_template: str | None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    texts: list[str] = field(default_factory=list)

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        assert parse_special, "control tokens of a template must become control tokens"
        self.texts.append(text)
        return [ord(letter) for letter in text]


@dataclass
class ScriptedEngine:
    """Replays its script for every request and remembers what it was asked."""

    script: list[Any]
    tokenizer: WordTokenizer = field(default_factory=lambda: WordTokenizer(TEMPLATE))
    model: str = ""
    options: Mapping[str, object] = field(default_factory=dict)
    requests: list[tuple[str | list[int], SamplingParams]] = field(default_factory=list)

    def __call__(self, model: str, options: Mapping[str, object], progress: Progress) -> ScriptedEngine:
        self.model, self.options = model, options
        progress("loading weights", 1, 1)
        return self

    def stream(self, prompt: str | list[int], sampling_params: SamplingParams) -> Iterator[Step]:
        self.requests.append((prompt, sampling_params))
        for step in self.script:
            if isinstance(step, BaseException):
                raise step
            yield step

    def stats(self) -> Mapping[str, Any]:
        return STATS


@dataclass
class Outcome:
    """What a run of the command left behind."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]
