"""What experiments run in: a model loaded once, engines over its weights, a text, sizes and progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch

from sash.bench.text import topics_ids
from sash.engine.build import Built, build_beside, build_core
from sash.engine.llm import LLM, engine_config
from sash.models.decoder import Decoder
from sash.ops.base import Ops
from sash.spec.errors import ConfigError
from sash.spec.load import load_spec
from sash.spec.locate import locate
from sash.spec.model import ModelSpec
from sash.spec.span import Span, SpanKind
from sash.text.base import Tokenizer
from sash.text.load import load_tokenizer

T = TypeVar("T")
Report = Callable[[str, int, int], None]
# Of the engine that only holds the weights: its own pools stay untouched, so they cost nothing.
_HOLDER = {"max_num_seqs": 1}


@dataclass(frozen=True, slots=True)
class Weights:
    """One model's weights in one precision, shared by every engine made over them."""

    built: Built

    @property
    def spec(self) -> ModelSpec:
        return self.built.spec

    @property
    def decoder(self) -> Decoder:
        return self.built.runner.decoder

    @property
    def ops(self) -> Ops:
        return self.decoder.ops

    def llm(self, spec: ModelSpec | None = None, **options: Any) -> LLM:
        """An engine with these options of ``sash.spec.config.EngineConfig``; ``spec`` is the model with other spans.

        Raises:
            ConfigError: an option can't work.
        """
        return LLM.over(build_beside(self.built, engine_config(options), spec))


class Context:
    """What an experiment gets.

    Args:
        model: as for ``sash generate``.
        quick: small sizes: does everything work, and which way do the figures point?
        text: what models read; None: Python's help topics.
        seed: of everything that is drawn.
        threads: that compute.
        report: called with (stage, done, total).
        options: of every engine, unless the experiment itself sets them.
        lengths: in tokens, ascending, in place of an experiment's own.
        windows: the same for sizes of windows.
    """

    def __init__(
        self,
        model: str,
        *,
        quick: bool = False,
        text: str | None = None,
        seed: int = 0,
        threads: int = 2,
        report: Report = lambda stage, done, total: None,
        options: dict[str, Any] | None = None,
        lengths: tuple[int, ...] = (),
        windows: tuple[int, ...] = (),
    ) -> None:
        self.model, self.quick, self.seed, self.threads = model, quick, seed, threads
        self.report, self.options = report, dict(options or {})
        self._lengths, self._windows = lengths, windows
        self._asked: set[str] = set()
        self._text = text
        self._ids: list[int] = []

    @property
    def lengths(self) -> tuple[int, ...]:
        """In tokens, ascending, in place of an experiment's own; empty: its own."""
        self._asked.add("--lengths")
        return self._lengths

    @property
    def windows(self) -> tuple[int, ...]:
        """The same for sizes of windows."""
        self._asked.add("--windows")
        return self._windows

    def unused(self) -> list[str]:
        """Options that were given and that nothing has asked for since the last call."""
        given = {"--lengths": self._lengths, "--windows": self._windows}
        asked, self._asked = self._asked, set()
        return [option for option, values in given.items() if values and option not in asked]

    @cached_property
    def spec(self) -> ModelSpec:
        """The model's description; needs no weights."""
        return load_spec(locate(self.model))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return load_tokenizer(locate(self.model).path)

    @cached_property
    def weights(self) -> Weights:
        """At the engine's defaults: what is served is what is measured."""
        return self._load()

    @cached_property
    def exact(self) -> Weights:
        """In float32 without quantisation: for differences that rounding would hide."""
        return self._load(dtype="float32", quantization="none")

    def _load(self, **options: Any) -> Weights:
        torch.set_num_threads(self.threads)
        return Weights(build_core(self.model, engine_config(self.options | _HOLDER | options), self.report))

    def llm(self, spec: ModelSpec | None = None, **options: Any) -> LLM:
        """An engine over ``weights``: fast to make, because nothing is loaded."""
        return self.weights.llm(spec, **(self.options | options))

    def pick(self, full: T, quick: T) -> T:
        """One of two sizes, by ``quick``."""
        return quick if self.quick else full

    def lengths_of(self, lengths: Iterable[int], room: int = 0) -> list[int]:
        """Those that were asked for, else ``lengths``, as far as they fit the model's context with
        ``room`` tokens more.

        Raises:
            ConfigError: none does.
        """
        wanted = self.lengths or tuple(lengths)
        fit = [n for n in wanted if n + room <= self.spec.max_position]
        if not fit:
            limit = self.spec.max_position
            raise ConfigError(
                f"no length of {', '.join(map(str, wanted))} fits the model's context of {limit} tokens with {room} "
                f"more; give --lengths at most {limit - room}"
            )
        return fit

    def in_windows(self, shares: Iterable[float], room: int = 0) -> list[int]:
        """The same for lengths that are multiples or parts of the model's window."""
        return self.lengths_of([max(1, int(share * self.window)) for share in shares], room)

    def ids(self, length: int) -> list[int]:
        """The text's first token ids [length]; a short text is repeated."""
        if len(self._ids) < length:
            if self._text is None:
                self._ids = topics_ids(self.tokenizer, length)
            else:
                ids = self.tokenizer.encode(self._text)
                self._ids = (ids * -(-length // len(ids)))[:length]
        return self._ids[:length]

    def track(self, stage: str, items: Iterable[T]) -> Iterator[T]:
        """The items, with a bar that moves on after each."""
        listed: Sequence[T] = list(items)
        self.report(stage, 0, len(listed))
        for i, item in enumerate(listed, 1):
            yield item
            self.report(stage, i, len(listed))

    @property
    def window(self) -> int:
        """W of the model's sliding layers; 0 where it has none."""
        return max((x.span.window for x in self.spec.layers if x.span.kind is SpanKind.SLIDING), default=0)


def with_spans(spec: ModelSpec, change: Callable[[int, Span], Span]) -> ModelSpec:
    """The model with other spans: ``change`` gets a layer's number and span."""
    layers = tuple(replace(layer, span=change(i, layer.span)) for i, layer in enumerate(spec.layers))
    return replace(spec, layers=layers)


def all_full(spec: ModelSpec) -> ModelSpec:
    """The model with full attention in every layer."""
    return with_spans(spec, lambda _, span: Span.full())


def all_windows(spec: ModelSpec, window: int) -> ModelSpec:
    """The model with this window in every layer."""
    return with_spans(spec, lambda _, span: Span.sliding(window))


def windows_of(spec: ModelSpec, window: int) -> ModelSpec:
    """The model with another window in its sliding layers; its full layers stay full."""
    return with_spans(spec, lambda _, span: Span.sliding(window) if span.kind is SpanKind.SLIDING else span)
