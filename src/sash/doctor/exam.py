"""Exam: a small engine of the model, and what is asked of it. The pools hold a few requests just past the window."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from sash.doctor.rule import most_pages
from sash.doctor.watch import Probe, Watch
from sash.engine.build import probe
from sash.engine.core import EngineCore
from sash.engine.messages import AddRequest
from sash.spec.config import EngineConfig
from sash.spec.groups import GroupSpec, group_layers
from sash.spec.machine import Machine
from sash.spec.model import ModelSpec
from sash.spec.sampling import SamplingParams, TokenLogprobs
from sash.spec.span import SpanKind

# Windows longer than this are not filled: the dense reference would take minutes.
LONGEST_WINDOW = 8192
# Text that is generated row by row; what must come before it is read as a prompt.
MOST_DECODED = 400
SCORES = 20
_DRAWN = 64  # best tokens that an answer's are drawn from
_SEATS = 4

# A core of the model with these options.
Factory = Callable[[EngineConfig], EngineCore]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of an exam: the text passes every window's ring at least once. ``prompt`` and ``decoded`` belong to the
    request that is watched alone, ``long`` is a prompt that has an edge between two chunks (0: none fits)."""

    prompt: int
    decoded: int
    long: int
    company: tuple[tuple[int, int], ...]  # prompt and answer of requests that run together

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(self.prompt + self.decoded, self.long + 1, *(a + b for a, b in self.company)) + 1


def sizes(groups: Sequence[GroupSpec], options: EngineConfig, max_position: int) -> Sizes | None:
    """What an exam of such a model asks; None where no text can pass its windows."""
    page = options.page_size
    rings = [most_pages(g.span, 3, page, 0) for g in groups if g.bounded]
    window = max([g.span.window for g in groups if g.span.kind is not SpanKind.FULL], default=0)
    ring = max((pages or 0 for pages in rings), default=0) * page
    end = max(ring, window) + 2 * page + 8 if window else 4 * page + 32
    if window > LONGEST_WINDOW or end > max_position - 2:
        return None
    prompt = 3 if end <= MOST_DECODED else end - 3 * page - 16
    chunk = _chunk(options)
    edge = chunk + min(window or 32, chunk) + 8
    long = edge if edge <= min(max_position - 2, 2 * LONGEST_WINDOW) else 0
    answer = min(2 * page + 8, 48)
    lengths = (3, max(window - 1, 5), max(end - answer, 6))
    return Sizes(prompt, end - prompt, long, tuple((length, answer) for length in lengths))


def _chunk(options: EngineConfig) -> int:
    step, chunk = options.max_num_batched_tokens, options.chunked_prefill_size
    return step if chunk is None or chunk < 0 else min(chunk, step)


def exam_options(spec: ModelSpec, wanted: EngineConfig, longest: int, machine: Machine) -> EngineConfig:
    """The user's options with pools for a few requests of an exam; what only sizes pools is checked elsewhere."""
    small = replace(
        wanted,
        max_model_len=longest,
        max_num_seqs=min(_SEATS, wanted.max_num_batched_tokens),
        max_total_tokens=None,
        swa_full_tokens_ratio=None,
        kv_cache_memory_bytes=None,
        request_timeout_s=None,
        speculative="none",
    )
    room = replace(machine, available_bytes=1 << 50)
    need = small.resolve(spec, room).demand.request_bytes()
    return replace(small, kv_cache_memory_bytes=small.max_num_seqs * need)


@dataclass
class Answer:
    """What came of one request: its text, and the scores of what follows each position from 0 on (None: unknown)."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    scores: list[TokenLogprobs | None] = field(default_factory=list)
    error: str | None = None

    @property
    def text(self) -> list[int]:
        """Prompt and answer."""
        return [*self.prompt, *self.tokens]


@dataclass
class Exam:
    """An engine under examination.

    Args:
        core: its own; nobody else uses it.
        spec: the model.
        sizes: of the texts.
    """

    core: EngineCore
    spec: ModelSpec
    sizes: Sizes

    def ask(
        self, lengths: Sequence[tuple[int, int]], probe: Probe | None = None, *, score_prompts: bool = True
    ) -> tuple[list[Answer], Watch]:
        """Run requests (prompt tokens, answer tokens) side by side over random text, under a watch."""
        watch = Watch(self.core, probe)
        answers: dict[str, Answer] = {}
        try:
            for number, (prompt, answer) in enumerate(lengths):
                name = f"exam-{number}"
                answers[name] = Answer(random_text(self.spec.vocab_size, prompt, number))
                if not score_prompts:
                    answers[name].scores += [None] * (prompt - 1)
                self.core.add(self._message(name, answers[name].prompt, answer, number, score_prompts))
            while self.core.has_work:
                for update in self.core.step():
                    take(answers[update.answer_id], update.token_ids, update.prompt_logprobs, update.logprobs)
                    answers[update.answer_id].error = update.error or answers[update.answer_id].error
        finally:
            watch.close()
        return list(answers.values()), watch

    def _message(self, name: str, prompt: tuple[int, ...], answer: int, seed: int, score_prompt: bool) -> AddRequest:
        count = min(SCORES, self.spec.vocab_size)
        # Drawn tokens, so that the text doesn't fall into a loop in which one row is like another; from a few, because
        # without the kernels noise over a whole vocabulary takes longer than a step.
        params = SamplingParams(
            max_tokens=answer,
            temperature=1.0,
            top_k=_DRAWN,
            logprobs=count,
            prompt_logprobs=count if score_prompt else None,
        )
        return AddRequest((name,), prompt, params, (seed,))


def take(
    answer: Answer,
    tokens: Sequence[int],
    prompt_scores: Sequence[TokenLogprobs | None] | None,
    scores: Sequence[TokenLogprobs],
) -> None:
    """Add news of a request to its answer."""
    if prompt_scores is not None:
        answer.scores += prompt_scores[1:]
    answer.tokens += tokens
    answer.scores += scores


def random_text(vocab_size: int, count: int, seed: int) -> tuple[int, ...]:
    """Token ids [count]; the same for the same seed."""
    draw = random.Random(seed)
    return tuple(draw.randrange(vocab_size) for _ in range(count))


def prepare(spec: ModelSpec, factory: Factory, wanted: EngineConfig) -> Exam | str:
    """An exam of a described model whose cores ``factory`` makes, or why there can be none."""
    groups = group_layers(spec)
    found = sizes(groups, wanted, spec.max_position)
    if found is None:
        window = max(g.span.window for g in groups)
        return (
            f"a window of {window} is not filled here: an exam fills at most {LONGEST_WINDOW} and the model's context"
        )
    options = exam_options(spec, wanted, found.longest, probe(wanted.device))
    return Exam(factory(options), spec, found)
