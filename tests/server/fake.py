"""A scripted engine behind the server: no process, no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from sash.engine.async_engine import Submission
from sash.engine.frontend import Frontend, Prompt
from sash.engine.messages import AddRequest, Ready, Update
from sash.engine.report import EngineReport, PoolReport
from sash.spec.errors import EngineDeadError, OverloadedError, RequestError
from sash.spec.model import ModelSpec
from sash.spec.sampling import SamplingParams, TokenLogprobs
from sash.text.base import Tokenizer

Script = Callable[[AddRequest, int], list[int | str]]


def letters(message: AddRequest, answer: int) -> list[int | str]:
    """Token ids 33, 34 … as many as asked for, then "length"."""
    count = 16 if message.params.max_tokens is None else message.params.max_tokens
    return [*(33 + (i + answer) % 60 for i in range(count)), "length"]


@dataclass
class FakeEngine:
    """Answers by a script: for each answer of a request, token ids, at last a finish reason (for an error maybe
    "error: text"). ``delay_s`` lies between
    two tokens. The texts are made by the real Frontend with a real tokenizer."""

    spec: ModelSpec
    tokenizer: Tokenizer | None
    script: Script = letters
    delay_s: float = 0.0
    alive: bool = True
    refuse: str | None = None
    overloaded: bool = False
    pid: int | None = None
    starts: int = 1
    die_after: int | None = None
    dies_of: EngineDeadError = field(
        default_factory=lambda: EngineDeadError("the engine failed; the request is lost, send it again")
    )
    info: Ready | None = field(default_factory=lambda: Ready(512, 4, "float32", "none", "pools"))
    params: list[SamplingParams] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.frontend = Frontend(self.spec, self.tokenizer, seed=0)
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        return self.frontend.num_open

    @asynccontextmanager
    async def submit(self, prompt: Prompt, params: SamplingParams) -> AsyncIterator[Submission]:
        if not self.alive:
            raise EngineDeadError("the engine is not running; try again in a moment")
        if self.overloaded:
            raise OverloadedError("4 answers run or wait and 0 more may; try again later", 7)
        request = self.frontend.open(prompt, params)
        if self.refuse:
            raise RequestError(self.refuse)
        self.params.append(params)
        self.prompts.append(list(request.message.prompt_token_ids))
        submission = Submission(request)
        self.frontend.started(request)
        task = asyncio.create_task(self._play(request.message, submission))
        self.tasks.add(task)
        try:
            yield submission
        finally:
            task.cancel()
            self.tasks.discard(task)
            self.cancelled += [message.answer_id for message in self.frontend.close(request)]

    async def _play(self, message: AddRequest, submission: Submission) -> None:
        scripts = [self.script(message, i) for i in range(len(message.answer_ids))]
        scores = message.params.logprobs
        self._score_prompt(message)
        for step in range(max(map(len, scripts))):
            await asyncio.sleep(self.delay_s)
            if self.die_after is not None and step >= self.die_after:
                submission.die(self.dies_of)
                return
            for answer_id, script in zip(message.answer_ids, scripts, strict=True):
                if step >= len(script):
                    continue
                item = script[step]
                if isinstance(item, str):
                    reason, _, error = item.partition(": ")
                    error = error or "scripted" if reason == "error" else None
                    self.frontend.take(Update(answer_id, finish_reason=reason, error=error))
                else:
                    logprob = TokenLogprobs(item, -0.5, 1, (item, 40)[: scores or 0], (-0.5, -1.5)[: scores or 0])
                    self.frontend.take(Update(answer_id, (item,), () if scores is None else (logprob,)))

    def _score_prompt(self, message: AddRequest) -> None:
        """Token i of the prompt has the log-probability -i."""
        if message.params.prompt_logprobs is None:
            return
        positions = [TokenLogprobs(t, -float(i), 1) for i, t in enumerate(message.prompt_token_ids)]
        self.frontend.take(Update(message.answer_ids[0], prompt_logprobs=(None, *positions[1:])))

    async def report(self, *, page_maps: bool = False, timeout_s: float = 10.0) -> EngineReport:
        if not self.alive:
            raise EngineDeadError("the engine is not running")
        pool = PoolReport(
            **{
                "name": "window",
                "span": "sliding 5",
                "layers": 5,
                "dtype": "float32",
                "page_size": 4,
                "page_bytes": 1024,
            },
            **{"num_pages": 12, "free_pages": 9, "held_pages": 3, "promised_pages": 0, "peak_pages": 6},
            **{"longest_pages": 3, "slid_pages": 40, "written_rows": 200, "requests": {"0.0": 3}},
            page_map=[("0.0", 3, 7), ("", 9, 0)] if page_maps else None,
        )
        return EngineReport(
            **{"pools": [pool], "requests": [], "max_model_len": 512, "max_num_seqs": 4, "running": 1, "waiting": 0},
            **{"waiting_for": {}, "steps": 10, "failed_steps": 0, "preemptions": 0, "prompt_tokens": 30},
            **{"generation_tokens": 9, "draft_tokens": 0, "accepted_tokens": 0, "uniform_peak_bytes": 1 << 20},
            **{"busy_s": 1.5, "step_tokens": {1: 9, 32: 1}},
        )
