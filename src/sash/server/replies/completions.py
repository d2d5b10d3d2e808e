"""Answers of /v1/completions, whole and as a stream."""

from __future__ import annotations

from sash.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from sash.server.generation import Batch, check_ending
from sash.server.protocol.common import usage_of
from sash.server.protocol.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from sash.server.replies.common import ChoiceWriter, Head, count_usage, encode, usage_chunk
from sash.server.replies.logprobs import CompletionScores, TokenNames, prompt_logprobs
from sash.server.sse import DONE
from sash.text.base import Tokenizer


class CompletionReply:
    """The answer to one body.

    Args:
        body: what was asked.
        head: id, model and time.
        prompts: token ids of each prompt.
        tokenizer: None where only ids go in and out.
    """

    def __init__(
        self, body: CompletionRequest, head: Head, prompts: list[list[int]], tokenizer: Tokenizer | None
    ) -> None:
        self.body = body
        self.head = head
        self.prompts = prompts
        self.n = body.n or 1
        self.names = TokenNames(tokenizer, bool(body.return_tokens_as_token_ids))
        skips = body.skip_special_tokens is not False
        self._skipped = tokenizer.special_ids if tokenizer is not None and skips else frozenset()
        self._strips = tokenizer is not None and tokenizer.strips_space
        self._texts = [""] * len(prompts)
        if body.echo and tokenizer is not None:
            self._texts = [tokenizer.decode(ids, skip_special=skips) for ids in prompts]

    def whole(self, wholes: list[RequestOutput]) -> bytes:
        """The answer as JSON. Raises ApiError where one of them is none."""
        choices = [self._choice(place, whole, output) for place, whole in enumerate(wholes) for output in whole.outputs]
        answer: Completion = {
            "id": self.head.id,
            "object": "text_completion",
            "created": self.head.created,
            "model": self.head.model,
            "choices": choices,
            "usage": count_usage(wholes),
        }
        return encode(answer)

    def _choice(self, place: int, whole: RequestOutput, output: CompletionOutput) -> CompletionChoice:
        check_ending(output, sent=False)
        logprobs = None
        if self.body.logprobs is not None:
            scores = self.scores()
            logprobs = self.echoed(scores, place, whole.prompt_logprobs) if self.body.echo else scores.piece([], [])
            extend(logprobs, scores.piece(output.token_ids, output.logprobs or []))
        choice: CompletionChoice = {
            "index": place * self.n + output.index,
            "text": self._texts[place] + output.text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.names, whole.prompt_logprobs)
        if self.body.return_token_ids:
            choice["token_ids"] = output.token_ids
            choice["prompt_token_ids"] = whole.prompt_token_ids
        return choice

    def scores(self) -> CompletionScores:
        """For the tokens of one choice, from its start."""
        return CompletionScores(self.names, self._skipped, self.body.logprobs or 0)

    def echoed(
        self, scores: CompletionScores, place: int, positions: list[PositionLogprobs | None] | None
    ) -> CompletionLogprobs:
        """The scores of a prompt."""
        prompt = self.prompts[place]
        return scores.piece(prompt, positions or [None] * len(prompt), strip=self._strips)

    def stream(self) -> CompletionStream:
        """The same as a stream."""
        return CompletionStream(self, self._texts)


def extend(logprobs: CompletionLogprobs, more: CompletionLogprobs) -> None:
    """Append scores to scores."""
    logprobs["text_offset"] += more["text_offset"]
    logprobs["token_logprobs"] += more["token_logprobs"]
    logprobs["tokens"] += more["tokens"]
    logprobs["top_logprobs"] += more["top_logprobs"]


class _Choice:
    """One choice under way."""

    def __init__(self, writer: ChoiceWriter, scores: CompletionScores) -> None:
        self.writer = writer
        self.scores = scores
        self.num_tokens = 0
        self.begun = False


class CompletionStream:
    """Deltas to the bytes of chunks."""

    def __init__(self, reply: CompletionReply, texts: list[str]) -> None:
        body = reply.body
        self._reply = reply
        self._texts = texts
        self._opening = reply.head.opening("text_completion")
        self._include_usage = body.include_usage
        # Fields beside the text make a chunk of every delta.
        self._plain = body.logprobs is None and not body.return_token_ids and not body.continuous_usage
        self._choices = [
            _Choice(ChoiceWriter(self._opening, i, b'"text":', b"", usage=self._include_usage), reply.scores())
            for i in range(len(reply.prompts) * reply.n)
        ]
        self._sent = False
        # Scores of the prompts come with the first news of a first answer; what comes before that must wait.
        self._awaits_scores = bool(body.echo) and body.logprobs is not None
        self._prompt_scores: dict[int, list[PositionLogprobs | None]] = {}
        self._early: dict[int, list[RequestOutput]] = {}

    def chunks(self, batch: Batch) -> bytes:
        """What a batch of deltas has to say, maybe nothing. Raises ApiError for an answer that failed."""
        if self._awaits_scores:
            batch = [(place, self._with_scores(place, deltas)) for place, deltas in batch]
        return b"".join([self._chunk(place, delta) for place, deltas in batch for delta in deltas])

    def _with_scores(self, place: int, deltas: list[RequestOutput]) -> list[RequestOutput]:
        """The deltas whose prompt's scores are there."""
        deltas = [*self._early.pop(place, ()), *deltas]
        found = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
        if found:
            self._prompt_scores[place] = found[0]
        ended = any(delta.outputs[0].error for delta in deltas)
        if place in self._prompt_scores or ended:
            return deltas
        self._early[place] = deltas
        return []

    def end(self, wholes: list[RequestOutput]) -> bytes:
        """The end of the stream."""
        return usage_chunk(self._opening, count_usage(wholes)) + DONE if self._include_usage else DONE

    def _chunk(self, place: int, delta: RequestOutput) -> bytes:
        output = delta.outputs[0]
        choice = self._choices[place * self._reply.n + output.index]
        text, reason = output.text, output.finish_reason
        if choice.begun and self._plain and reason is None:
            return choice.writer.text(text) if text else b""
        check_ending(output, sent=self._sent)
        if not choice.begun:
            text = self._texts[place] + text
        elif not text and reason is None and self._plain:
            return b""
        data = self._full(choice, place, delta, text)
        choice.begun = self._sent = True
        return data

    def _full(self, choice: _Choice, place: int, delta: RequestOutput, text: str) -> bytes:
        body, output = self._reply.body, delta.outputs[0]
        logprobs = None
        if body.logprobs is not None:
            logprobs = choice.scores.piece([], [])
            if body.echo and not choice.begun:
                logprobs = self._reply.echoed(choice.scores, place, self._prompt_scores.get(place))
            extend(logprobs, choice.scores.piece(output.token_ids, output.logprobs or []))
        fields: dict[str, object] = {}
        if output.finish_reason is not None:
            fields["stop_reason"] = output.stop_reason
        if body.return_token_ids:
            fields["token_ids"] = output.token_ids
            if not choice.begun:
                fields["prompt_token_ids"] = delta.prompt_token_ids
        choice.num_tokens += len(output.token_ids)
        usage = usage_of(len(delta.prompt_token_ids), choice.num_tokens) if body.continuous_usage else None
        return choice.writer.full(
            text, logprobs=logprobs, finish_reason=output.finish_reason, choice=fields, usage=usage
        )
