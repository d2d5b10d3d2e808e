"""LLM: the engine in one object, for scripts. Names and shapes follow vLLM's offline class."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, cast

import msgspec

from sash.engine.build import Built, build_core
from sash.engine.frontend import Frontend, Prompt, Request
from sash.engine.outputs import RequestOutput
from sash.engine.turns import Turns
from sash.spec.config import EngineConfig
from sash.spec.errors import ConfigError, RequestError
from sash.spec.sampling import SamplingParams
from sash.text.chat import encode_chat
from sash.text.load import load_tokenizer
from sash.weights.load import Progress

_ALIASES = {"max_total_num_tokens": "max_total_tokens", "max_predict_length": "max_model_len"}


class LLM:
    """A model that generates text. Threads may share one: their requests run together.

    Args:
        model: gemma3-270m, smollm2-135m, a Hugging Face folder, a .gguf file or a hub id.
        progress: called with (stage, done, total) while loading and on long prompts.
        options: those of ``sash.spec.config.EngineConfig``; ``max_total_num_tokens`` and
            ``max_predict_length`` are other names of max_total_tokens and max_model_len.

    Raises:
        ModelError: the model can't be found, read or run.
        ConfigError: an option that is unknown or can't work.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        self._take(build_core(model, engine_config(options), progress), progress)

    @classmethod
    def over(cls, built: Built, progress: Progress | None = None) -> LLM:
        """An LLM around a core that is built already."""
        llm = cls.__new__(cls)
        llm._take(built, progress)
        return llm

    def _take(self, built: Built, progress: Progress | None) -> None:
        self.core = built.core
        self.spec = built.spec
        self.config = built.config
        self.tokenizer = load_tokenizer(built.source.path)
        self._frontend = Frontend(built.spec, self.tokenizer, built.config.options.seed)
        self._progress = progress
        self._turns = Turns()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, all at once as far as the pools go; outputs stand in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, a mapping with prompt or prompt_token_ids, or a
                list of these.
            sampling_params: one for all prompts, or one each.

        Raises:
            RequestError: a prompt or its parameters can never run; nothing was started. What goes
                wrong later ends only its own answer, with finish_reason "error".
        """
        listed = _as_list(prompts)
        params = _params_for(listed, sampling_params)
        requests = []
        for i, (prompt, own) in enumerate(zip(listed, params, strict=True)):
            try:
                request = self._open(prompt, own)
            except RequestError as error:
                raise RequestError(f"prompt {i}: {error}" if len(listed) > 1 else str(error)) from error
            requests.append(request)
        try:
            for request in requests:
                self._start(request)
            while not all(r.whole.finished for r in requests):
                self._pump()
                if self._progress:
                    self._progress("requests", sum(r.whole.finished for r in requests), len(requests))
        finally:
            for request in requests:
                self._stop(request)
        return [r.whole for r in requests]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Deltas of one request as they come; leaving the loop early cancels it.

        The request starts when the first delta is asked for. Several streams of one LLM may be read
        in turn; they run together.

        Raises:
            RequestError: the request can never run.
        """
        return self._deltas(self._open(prompt, _params_for([prompt], sampling_params)[0]))

    def _deltas(self, request: Request) -> Iterator[RequestOutput]:
        self._start(request)
        total = len(request.whole.prompt_token_ids)
        read = 0 if total > self.config.chunk else total
        try:
            while request.deltas or not request.whole.finished:
                while not request.deltas:
                    self._pump()
                    # Told until it is read: a bar that came again between two tokens would wipe their line away.
                    if self._progress and read < total:
                        read = min(request.computed_tokens, total)
                        self._progress("prompt", read, total)
                yield request.deltas.pop(0)
        finally:
            self._stop(request)

    def _open(self, prompt: Prompt, params: SamplingParams) -> Request:
        request = self._frontend.open(prompt, params)
        with self._turns:
            self.core.check_request(request.message)
            self.core.compile(request.message)
        return request

    def _start(self, request: Request) -> None:
        with self._turns:
            self.core.add(request.message)
            self._frontend.started(request)

    def _stop(self, request: Request) -> None:
        with self._turns:
            for message in self._frontend.close(request):
                self.core.cancel(message)

    def _pump(self) -> None:
        """One step, its news handed to the requests, those of other threads among them."""
        with self._turns:
            for update in self.core.step():
                cancel = self._frontend.take(update)
                if cancel is not None:
                    self.core.cancel(cancel)

    def chat(
        self, messages: Sequence[Mapping[str, str]], sampling_params: SamplingParams | None = None
    ) -> RequestOutput:
        """Answer a conversation, see ``chat_prompt``."""
        return self.generate([self.chat_prompt(messages)], sampling_params)[0]

    def chat_prompt(self, messages: Sequence[Mapping[str, str]], chat_template: str | None = None) -> list[int]:
        """A conversation in the model's own form, ready for its next answer: token ids.

        Raises:
            ModelError: the model has no chat template and none is given.
        """
        return encode_chat(self.tokenizer, messages, template=chat_template)

    def stats(self) -> dict[str, Any]:
        """Pools, pages per request and counters: ``sash.engine.report.EngineReport`` as a mapping."""
        with self._turns:
            return cast(dict[str, Any], msgspec.to_builtins(self.core.report(), str_keys=False))


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """Options by name, aliases included, as a config.

    Raises:
        ConfigError: an unknown name, with the nearest known one; or a name and its alias together.
    """
    import difflib

    known = set(EngineConfig.__dataclass_fields__)
    out: dict[str, Any] = {}
    for given, value in options.items():
        name = _ALIASES.get(given, given)
        if name not in known:
            near = difflib.get_close_matches(given, [*known, *_ALIASES], 1)
            raise ConfigError(f"unknown option {given!r}" + (f"; did you mean {near[0]}?" if near else ""))
        if name in out:
            raise ConfigError(f"{name} is given twice, once by its other name; give one of them")
        out[name] = value
    return EngineConfig(**out)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | bytes | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be a text, token ids or a list of these, got {type(prompts).__name__}")
    if prompts and isinstance(prompts[0], Integral):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _params_for(
    prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(f"sampling_params must be SamplingParams or a list of them, got {params!r}")
    if len(params) != len(prompts):
        raise RequestError(f"{len(params)} sampling_params for {len(prompts)} prompts: give one, or one per prompt")
    return list(params)
