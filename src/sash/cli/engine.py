"""The one door from the command line to the engine: what commands need of it, and how it is built.

Commands take the builder from typer's context, so tests hand in a scripted engine. torch loads
only when the real builder runs.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import typer

from sash.cli.options import EngineOptions
from sash.cli.progress import Progress
from sash.cli.streams import log_to_stderr
from sash.spec.sampling import SamplingParams

if TYPE_CHECKING:
    from sash.text.base import Tokenizer


class Completion(Protocol):
    """One answer of a delta: what is new since the delta before. Properties, so that any kind of field fits."""

    @property
    def index(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[object] | None: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def error(self) -> str | None: ...


class Delta(Protocol):
    """What one step added to a request."""

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def prompt_logprobs(self) -> Sequence[object] | None: ...
    @property
    def outputs(self) -> Sequence[Completion]: ...


class Engine(Protocol):
    """The part of ``sash.engine.llm.LLM`` that commands use."""

    def stream(self, prompt: str | list[int], sampling_params: SamplingParams) -> Iterator[Delta]:
        """Deltas of one request."""

    def stats(self) -> Mapping[str, Any]:
        """Pools and counters."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's; it knows the chat template."""


Builder = Callable[[str, Mapping[str, object], Progress], Engine]


def build(model: str, options: Mapping[str, object], progress: Progress) -> Engine:
    """The real engine."""
    log_to_stderr(logging.INFO)
    # libgomp reads it when torch loads. Its own default spins for milliseconds at every barrier, which makes
    # decoding several times slower when anything else wants the cores (docs/log.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    from sash.engine.llm import LLM

    return LLM(model, **options, progress=progress)


def open_engine(
    ctx: typer.Context,
    model: str,
    options: EngineOptions,
    progress: Progress,
    rehearse: Callable[[Tokenizer], object] | None = None,
) -> Engine:
    """An engine from the builder of the context, or the real one.

    ``rehearse`` gets the model's tokenizer before the weights load, which takes far longer: what it
    refuses is refused at once.
    """
    given = options.given()
    builder: Builder | None = ctx.obj
    if builder is not None:
        engine = builder(model, given, progress)
        if rehearse:
            rehearse(engine.tokenizer)
        return engine
    if rehearse:
        from sash.spec.locate import locate
        from sash.text.load import load_tokenizer

        rehearse(load_tokenizer(locate(model).path))
    return build(model, given, progress)


@dataclass
class Answer:
    """One answer, put together from its deltas."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[object] | None = None
    finish_reason: str | None = None
    error: str | None = None

    def add(self, part: Completion) -> None:
        """Append a delta."""
        self.text += part.text
        self.token_ids += part.token_ids
        if part.logprobs:
            self.logprobs = [*(self.logprobs or []), *part.logprobs]
        self.finish_reason = part.finish_reason or self.finish_reason
        self.error = part.error or self.error


@dataclass
class Run:
    """One request from start to end. Times in seconds since ``started``."""

    answers: dict[int, Answer] = field(default_factory=dict)
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[object] | None = None
    first_token_s: float | None = None
    total_s: float = 0.0

    def timings(self, load_s: float) -> dict[str, float | int | None]:
        """Counts, seconds and rates; a rate is None where there is nothing to divide."""
        generated = sum(len(answer.token_ids) for answer in self.answers.values())
        first_s = self.first_token_s or 0.0
        decode_s = self.total_s - first_s
        later = generated - len(self.answers)
        return {
            "load_s": load_s,
            "prompt_tokens": len(self.prompt_token_ids),
            "generated_tokens": generated,
            "first_token_s": self.first_token_s,
            "total_s": self.total_s,
            "prefill_tokens_per_s": len(self.prompt_token_ids) / first_s if first_s > 0 else None,
            "decode_tokens_per_s": later / decode_s if later > 0 and decode_s > 0 else None,
        }


def run_request(
    engine: Engine, prompt: str | list[int], params: SamplingParams, on_text: Callable[[str], None] | None = None
) -> Run:
    """Drive one request to its end; ``on_text`` gets the first answer's text as it comes."""
    run = Run()
    started = time.perf_counter()
    for delta in engine.stream(prompt, params):
        run.prompt_token_ids = list(delta.prompt_token_ids)
        if delta.prompt_logprobs is not None:
            run.prompt_logprobs = list(delta.prompt_logprobs)
        for part in delta.outputs:
            if part.token_ids and run.first_token_s is None:
                run.first_token_s = time.perf_counter() - started
            run.answers.setdefault(part.index, Answer()).add(part)
            if on_text and part.index == 0 and part.text:
                on_text(part.text)
    run.total_s = time.perf_counter() - started
    return run


def report_endings(run: Run) -> None:
    """Tell on standard error why an answer ended early.

    Raises:
        typer.Exit: with 1, where the engine failed on an answer.
    """
    answers = run.answers.values()
    if any(answer.finish_reason == "timeout" for answer in answers):
        print("sash: the answer was ended by --request-timeout-s; a larger number lets it finish", file=sys.stderr)
    errors = [answer.error or "unknown" for answer in answers if answer.finish_reason == "error"]
    if errors:
        print(f"sash: the request failed: {errors[0]}", file=sys.stderr)
        raise typer.Exit(1)
