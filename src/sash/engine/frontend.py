"""Frontend: text on one side, the core's messages on the other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Integral
from typing import cast

from sash.engine.messages import AddRequest, CancelRequest, Update
from sash.engine.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from sash.spec.errors import RequestError
from sash.spec.model import ModelSpec
from sash.spec.sampling import SamplingParams, TokenLogprobs, mix64
from sash.text.base import Tokenizer
from sash.text.detokenize import IncrementalText

_CACHED_PIECES = 1 << 16
Prompt = str | Sequence[int] | Mapping[str, object]


@dataclass(slots=True)
class _Answer:
    """One answer: ``output`` grows; ``text`` is None where there is no tokenizer. Of its drafts ``draft_tokens``
    and ``accepted_tokens`` are in the request's metrics."""

    output: CompletionOutput
    text: IncrementalText | None
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class Request:
    """A request in front of the core. ``whole`` accumulates; ``deltas`` wait to be taken, and ``wake`` is called
    when there is a new one."""

    message: AddRequest
    whole: RequestOutput
    answers: dict[str, _Answer]
    added_at_s: float
    computed_tokens: int = 0
    deltas: list[RequestOutput] = field(default_factory=list)
    wake: Callable[[], None] | None = None


class Frontend:
    """Makes messages of prompts, and outputs of updates.

    Args:
        spec: the model; its stop tokens end answers.
        tokenizer: None where only token ids go in and out.
        seed: of requests that bring none.
        clock: seconds, monotonic, the core's.
    """

    def __init__(
        self, spec: ModelSpec, tokenizer: Tokenizer | None, seed: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._seed = seed
        self._clock = clock
        self._numbers = itertools.count()
        self._by_answer: dict[str, Request] = {}
        # Log-probabilities name the same tokens over and over.
        self._piece = lru_cache(_CACHED_PIECES)(self._decode_one)

    def open(self, prompt: Prompt, params: SamplingParams) -> Request:
        """A request, numbered and tokenized, ready to be added to the core. May be called from any thread.

        Raises:
            RequestError: the prompt is empty or of another type, or its text needs a tokenizer.
        """
        text, ids = self._tokenize(prompt)
        number = next(self._numbers)
        seed = mix64(self._seed ^ mix64(number)) if params.seed is None else params.seed
        stop_ids = () if params.ignore_eos else self._spec.stop_token_ids
        message = AddRequest(
            answer_ids=tuple(f"{number}.{i}" for i in range(params.n)),
            prompt_token_ids=tuple(ids),
            params=params,
            seeds=tuple(seed if i == 0 else mix64(seed ^ mix64(i)) for i in range(params.n)),
            stop_token_ids=tuple(dict.fromkeys((*stop_ids, *params.stop_token_ids))),
        )
        outputs = [CompletionOutput(i, logprobs=None if params.logprobs is None else []) for i in range(params.n)]
        whole = RequestOutput(str(number), text, list(ids), outputs)
        answers = {
            answer_id: _Answer(output, self._text(params))
            for answer_id, output in zip(message.answer_ids, outputs, strict=True)
        }
        return Request(message, whole, answers, self._clock())

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                prompt = prompt["prompt_token_ids"]  # type: ignore[assignment]
            elif "prompt" in prompt:
                prompt = prompt["prompt"]  # type: ignore[assignment]
            else:
                raise RequestError("a prompt given as a mapping needs the key prompt or prompt_token_ids")
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty; give some text or token ids")
            if self._tokenizer is None:
                raise RequestError("this engine has no tokenizer; give the prompt as token ids")
            return prompt, self._tokenizer.encode(prompt, parse_special=True)
        if isinstance(prompt, bytes | bytearray):  # its numbers would pass for token ids
            raise RequestError("a prompt is a string or a list of token ids, got bytes; decode them, as UTF-8 mostly")
        if not isinstance(prompt, Sequence):
            raise RequestError(f"a prompt is a string or a list of token ids, got {type(prompt).__name__}")
        if not prompt:
            raise RequestError("the prompt is empty; give some text or token ids")
        if set(map(type, prompt)) == {int}:  # the common case, without a call for each
            return None, list(cast(Sequence[int], prompt))
        for i, token in enumerate(prompt):
            if isinstance(token, bool) or not isinstance(token, Integral):
                raise RequestError(f"token ids of a prompt must be integers, got {token!r} at place {i}")
        return None, [int(t) for t in prompt]

    def _text(self, params: SamplingParams) -> IncrementalText | None:
        if self._tokenizer is None:
            if params.stop:
                raise RequestError("stop strings need a tokenizer; use stop_token_ids")
            return None
        return IncrementalText(
            self._tokenizer, tuple(params.stop), params.include_stop_str_in_output, params.skip_special_tokens
        )

    @property
    def num_open(self) -> int:
        """Answers that are started and unfinished."""
        return len(self._by_answer)

    def started(self, request: Request) -> None:
        """The core has taken the request: its updates will come."""
        for answer_id in request.message.answer_ids:
            self._by_answer[answer_id] = request

    def close(self, request: Request) -> list[CancelRequest]:
        """Nobody listens any more: what to tell the core."""
        open_ids = [a for a in request.message.answer_ids if self._by_answer.pop(a, None) is not None]
        return [CancelRequest(a) for a in open_ids]

    def take(self, update: Update) -> CancelRequest | None:
        """Turn an update into a delta of its request; returns a message for the core when a stop
        string has ended the answer there."""
        request = self._by_answer.get(update.answer_id)
        if request is None:
            return None
        answer, whole, tokens = request.answers[update.answer_id], request.whole, update.token_ids
        output = answer.output
        self._note(request, answer, update)
        piece, stopped = self._advance(answer, request.message.params, update)
        reason = update.finish_reason
        cause: str | int | None = stopped
        if stopped is not None:
            reason = "stop"
        elif reason == "stop" and tokens:
            cause = tokens[-1]
        delta = CompletionOutput(output.index, piece, list(tokens), None, None, reason, cause, update.error)
        output.token_ids += tokens
        output.text += piece
        output.finish_reason, output.stop_reason, output.error = reason, cause, update.error
        if output.logprobs is not None:
            delta.logprobs = [self._position(p) for p in update.logprobs]
            output.logprobs += delta.logprobs
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(p.logprob for p in update.logprobs)
            delta.cumulative_logprob = output.cumulative_logprob
        prompt_scores = None
        if update.prompt_logprobs is not None:
            prompt_scores = [None if p is None else self._position(p) for p in update.prompt_logprobs]
            whole.prompt_logprobs = prompt_scores
        if tokens or reason or prompt_scores:
            request.deltas.append(
                RequestOutput(
                    whole.request_id, whole.prompt, whole.prompt_token_ids, [delta], prompt_scores, whole.metrics
                )
            )
            if request.wake is not None:
                request.wake()
        if reason is None:
            return None
        del self._by_answer[update.answer_id]
        return CancelRequest(update.answer_id) if stopped is not None and update.finish_reason is None else None

    def _advance(self, answer: _Answer, params: SamplingParams, update: Update) -> tuple[str, str | None]:
        """New text of an answer, and the stop string that has ended it."""
        text, tokens = answer.text, update.token_ids
        if text is None:
            return "", None
        piece = ""
        early = params.min_tokens and max(params.min_tokens - len(answer.output.token_ids), 0)
        if early:
            piece, tokens = text.push(tokens[:early], check_stop=False), tokens[early:]
        piece += text.push(tokens)
        if update.finish_reason is not None and text.stopped is None:
            piece += text.finish()
        return piece, text.stopped

    def _note(self, request: Request, answer: _Answer, update: Update) -> None:
        """Times and counts that came with an update."""
        metrics, since_s = request.whole.metrics, self._clock() - request.added_at_s
        metrics.total_s = since_s
        if update.computed_tokens > request.computed_tokens:
            request.computed_tokens = update.computed_tokens
        if metrics.queue_s is None and update.scheduled_at_s is not None:
            metrics.queue_s = max(update.scheduled_at_s - request.added_at_s, 0.0)
        if metrics.first_token_s is None and update.token_ids:
            metrics.first_token_s = since_s
        if update.preemptions > metrics.preemptions:
            metrics.preemptions = update.preemptions
        if update.draft_tokens != answer.draft_tokens:
            metrics.draft_tokens += update.draft_tokens - answer.draft_tokens
            metrics.accepted_tokens += update.accepted_tokens - answer.accepted_tokens
            answer.draft_tokens, answer.accepted_tokens = update.draft_tokens, update.accepted_tokens

    def _position(self, scores: TokenLogprobs) -> PositionLogprobs:
        out = {scores.token_id: Logprob(scores.logprob, scores.rank, self._piece(scores.token_id))}
        for rank, (token, value) in enumerate(zip(scores.top_ids, scores.top_logprobs, strict=True), 1):
            out.setdefault(token, Logprob(value, rank, self._piece(token)))
        return out

    def _decode_one(self, token: int) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode([token], skip_special=False)
