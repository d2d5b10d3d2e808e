"""EngineCore: the step loop. Takes messages, gives updates; knows ids and numbers, no text."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import torch

from sash.engine.drafts import PromptLookup
from sash.engine.grammars import Constraint, Grammars
from sash.engine.messages import AddRequest, CancelRequest, Update
from sash.engine.report import EngineReport
from sash.engine.runner import StepResult
from sash.engine.sequence import Sequence
from sash.engine.telemetry import Counters, make_report
from sash.kv.ledger.ledger import Ledger
from sash.ops.sampling import sampler_state
from sash.scheduler.plan import StepItem, StepPlan
from sash.scheduler.scheduler import Scheduler, Ticket
from sash.spec.config import ResolvedConfig
from sash.spec.errors import LedgerError, RequestError
from sash.spec.log import logger
from sash.spec.sampling import TokenLogprobs


class StepRunner(Protocol):
    """What the core needs of a runner."""

    device: torch.device

    def run(self, plan: StepPlan, sequences: dict[str, Sequence]) -> StepResult:
        """Carry out a plan; may raise, and then has changed nothing but rows of the plan."""


class EngineCore:
    """Schedule, run, settle, over and over.

    Args:
        config: the resolved configuration.
        vocab_size: V; token ids outside are refused.
        runner: carries out plans.
        clock: seconds, monotonic.
        grammars: for requests with structured_outputs; None refuses them.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        vocab_size: int,
        runner: StepRunner,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
    ) -> None:
        self.config = config
        self.grammars = grammars
        self.runner = runner
        self.ledger = Ledger(config.demand, config.pages)
        self.scheduler = Scheduler(
            self.ledger,
            max_num_seqs=config.options.max_num_seqs,
            max_batched_tokens=config.options.max_num_batched_tokens,
            chunk=config.chunk,
        )
        self._vocab_size = vocab_size
        self._clock = clock
        self._sequences: dict[str, Sequence] = {}
        self._arrivals = 0
        self._updates: list[Update] = []
        self.counters = Counters()

    @property
    def has_work(self) -> bool:
        """Whether any answer is unfinished or any update undelivered."""
        return bool(self._sequences or self._updates)

    def add(self, request: AddRequest) -> None:
        """Queue a request. Waits while its grammar is compiled, see ``compiles``.

        Raises:
            RequestError: it can never run here, a token id is out of range, or its grammar can't be compiled;
                nothing changed.
        """
        self.check_request(request)
        prompt, params = request.prompt_token_ids, request.params
        constraints = self._constraints(request)
        limit = self._answer_limit(request)
        timeout = self.config.options.request_timeout_s
        tickets = []
        for i, (answer_id, seed) in enumerate(zip(request.answer_ids, request.seeds, strict=True)):
            wants_scores = i == 0 and params.prompt_logprobs is not None
            self._sequences[answer_id] = Sequence(
                answer_id=answer_id,
                tokens=list(prompt),
                prompt_tokens=len(prompt),
                max_tokens=limit,
                params=params,
                state=sampler_state(
                    params,
                    seed=seed,
                    stop_ids=request.stop_token_ids,
                    prompt=prompt,
                    vocab_size=self._vocab_size,
                    device=self.runner.device,
                ),
                stop_token_ids=frozenset(request.stop_token_ids),
                deadline_s=None if timeout is None else self._clock() + timeout,
                prompt_scores=[None] if wants_scores else None,
                lookup=None if constraints else self._lookup(),
                constraint=constraints[i] if constraints else None,
            )
            tickets.append(Ticket(answer_id, self._arrivals, len(prompt), self._rows(len(prompt), limit)))
            self._arrivals += 1
        tickets[0].siblings = tickets[1:]
        self.scheduler.add(tickets[0])

    def compiles(self, request: AddRequest) -> bool:
        """Whether the request's grammar is still being compiled, so that ``add`` would wait for it. What has come of
        it is taken by ``Grammars.poll``."""
        wanted = request.params.structured_outputs
        return wanted is not None and self.grammars is not None and not self.grammars.begin(wanted).decided

    def compile(self, request: AddRequest) -> None:
        """Wait until the request's grammar is compiled, if it has one.

        Raises:
            RequestError: it can't be compiled.
        """
        self._constraints(request)

    def _constraints(self, request: AddRequest) -> list[Constraint]:
        """One for each answer, none without a grammar."""
        wanted = request.params.structured_outputs
        if wanted is None:
            return []
        if self.grammars is None:
            raise RequestError("structured_outputs need a tokenizer, which this engine hasn't")
        grammar = self.grammars.compile(wanted)
        return [self.grammars.constraint(grammar) for _ in request.answer_ids]

    def _lookup(self) -> PromptLookup | None:
        options = self.config.options
        if options.speculative == "none":
            return None
        return PromptLookup(options.num_speculative_tokens, options.prompt_lookup_max, options.prompt_lookup_min)

    def _answer_limit(self, request: AddRequest) -> int:
        """Most tokens of an answer: what is asked for, as far as the context has room."""
        room = self.config.max_model_len - len(request.prompt_token_ids)
        wanted = request.params.max_tokens
        return room if wanted is None else min(wanted, room)

    @staticmethod
    def _rows(prompt_tokens: int, max_tokens: int) -> int:
        """Rows that a request computes at most: the last token's is never needed."""
        return prompt_tokens + max(max_tokens, 1) - 1

    def check_request(self, request: AddRequest) -> None:
        """Refuse what can never run.

        Raises:
            RequestError: with the numbers.
        """
        prompt, params = request.prompt_token_ids, request.params
        if len({*request.answer_ids}) < len(request.answer_ids) or not self._sequences.keys().isdisjoint(
            request.answer_ids
        ):
            raise RequestError(f"answer_ids {request.answer_ids} are not new; give each answer an id of its own")
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token")
        if len(prompt) + (params.max_tokens != 0) > self.config.max_model_len:
            longest = self.config.max_model_len - 1
            shorter = f"shorten it to {longest} tokens or " if longest else ""
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and max_model_len is {longest + 1}: {shorter}raise max_model_len"
            )
        for name, ids in (
            ("prompt", prompt),
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("bad_token_ids", params.bad_token_ids),
            ("stop_token_ids", params.stop_token_ids),
        ):
            wrong = [t for t in ids if not 0 <= t < self._vocab_size]
            if wrong:
                raise RequestError(f"{name} has token id {wrong[0]}; ids of this model are 0 to {self._vocab_size - 1}")
        limit = self._answer_limit(request)
        reason = self.ledger.fits_ever(len(prompt), self._rows(len(prompt), limit))
        if reason:
            raise RequestError(
                f"a prompt of {len(prompt)} tokens with max_tokens={limit} can never run: {reason}; lower max_tokens, "
                f"shorten the prompt, or give the engine more kv_cache_memory_bytes"
            )

    def cancel(self, request: CancelRequest) -> None:
        """End an answer; its pages are free before the next step is scheduled."""
        if request.answer_id in self._sequences:
            self._finish(request.answer_id, "cancelled")

    def step(self) -> list[Update]:
        """One step: schedule, run, settle; returns the news. Never raises for a request's sake.

        Raises:
            LedgerError: no request can run although some wait, which is a defect.
        """
        self._expire()
        self._end_complete()
        self._draft()
        plan = self.scheduler.schedule()
        if plan is not None:
            self._note_step(plan)
            started = self._clock()
            try:
                result = self.runner.run(plan, self._sequences)
            except Exception as error:
                self._recover(plan, error)
            except BaseException:  # Ctrl-C: the step is undone, so that the engine can go on
                self.scheduler.fail(plan, blame=False)
                raise
            else:
                accepted = {i.request_id: result.accepted(i) for i in plan.items if i.num_drafts}
                self.scheduler.settle(plan, accepted, result.late)
                self.counters.late_masks += len(result.late)
                for item in plan.items:
                    self._settle(item, result)
            self.counters.busy_s += self._clock() - started
            if self.config.options.debug:
                self.scheduler.check()
        elif self._sequences and not self._updates:
            raise LedgerError("requests are waiting, none runs, and none can be admitted")
        updates, self._updates = self._updates, []
        return updates

    def _expire(self) -> None:
        now = self._clock()
        for answer_id, seq in list(self._sequences.items()):
            if seq.deadline_s is not None and now >= seq.deadline_s:
                self._finish(answer_id, "timeout")

    def _end_complete(self) -> None:
        """End answers whose text is known to be complete: nothing may follow. Mostly that is known before the row
        which would find out is scheduled."""
        constrained = [seq for seq in self._sequences.values() if seq.constraint is not None]
        if constrained and self.grammars is not None:
            self.grammars.poll()
        for seq in constrained:
            if seq.generated and seq.constraint and seq.constraint.ready and seq.constraint.ended:
                self._finish(seq.answer_id, "stop")

    def _draft(self) -> None:
        """Guess what follows the newest token of every request that may check guesses in the next step."""
        for ticket in self.scheduler.running:
            seq = self._sequences[ticket.request_id]
            if seq.lookup is not None and ticket.decoding and not ticket.alone:
                seq.draft = seq.lookup.propose(seq.tokens)
                ticket.drafts = len(seq.draft)

    def _note_step(self, plan: StepPlan) -> None:
        self.counters.note_step(plan, self.config.demand, self.scheduler.running)
        now = self._clock()
        for item in plan.items:
            for answer_id in (item.request_id, *item.forks):
                seq = self._sequences[answer_id]
                seq.scheduled_at_s = seq.scheduled_at_s or now

    def _settle(self, item: StepItem, result: StepResult) -> None:
        """Tell of one item's progress and tokens."""
        if item.request_id not in self._sequences:
            return
        seq = self._sequences[item.request_id]
        if item.request_id in result.prompt_scores and seq.prompt_scores is not None:
            seq.prompt_scores += result.prompt_scores[item.request_id]
        self.counters.prompt_tokens += max(min(item.end, seq.prompt_tokens) - item.start, 0)
        if not item.samples:
            self._updates.append(self._update(seq))
            return
        for answer_id in (item.request_id, *item.forks):
            if answer_id in result.errors:
                self._finish(answer_id, "error", result.errors[answer_id])
            elif answer_id in result.complete:
                self._finish(answer_id, "stop")
            elif answer_id in result.tokens:
                self._take_tokens(item, self._sequences[answer_id], result)

    def _take_tokens(self, item: StepItem, seq: Sequence, result: StepResult) -> None:
        """An update per token, so that drafts change nothing in what is told; none after the answer's end."""
        scores = result.logprobs.get(seq.answer_id, [])
        if item.num_drafts and seq.lookup is not None:
            self.counters.draft_tokens += item.num_drafts
            self.counters.accepted_tokens += result.accepted(item)
            seq.lookup.settle(item.num_drafts, result.accepted(item))
            seq.draft_tokens += item.num_drafts
            seq.accepted_tokens += result.accepted(item)
        for i, token in enumerate(result.tokens[seq.answer_id]):
            if seq.answer_id in self._sequences:
                self._take_token(seq, token, scores[i : i + 1])

    def _take_token(self, seq: Sequence, token: int, scores: list[TokenLogprobs]) -> None:
        before = seq.generated
        reason = seq.append(token)
        taken = seq.generated > before
        self.counters.generation_tokens += taken
        update = self._update(
            seq,
            token_ids=(token,) if taken else (),
            logprobs=tuple(scores) if taken else (),
            prompt_logprobs=None if seq.prompt_scores is None or before else tuple(seq.prompt_scores),
            finish_reason=reason,
        )
        self._updates.append(update)
        if reason is not None:
            self._close(seq.answer_id)
        elif seq.constraint is not None:
            seq.constraint.owner.ask(seq.constraint, seq.tokens, seq.prompt_tokens)

    def _update(self, seq: Sequence, **news: Any) -> Update:
        ticket = self.scheduler.find(seq.answer_id)
        return Update(
            seq.answer_id,
            computed_tokens=ticket.computed if ticket else 0,
            preemptions=ticket.preemptions if ticket else 0,
            draft_tokens=seq.draft_tokens,
            accepted_tokens=seq.accepted_tokens,
            scheduled_at_s=seq.scheduled_at_s,
            **news,
        )

    def _finish(self, answer_id: str, reason: str, error: str | None = None) -> None:
        """End an answer without a token: last update out, pages back."""
        self._updates.append(self._update(self._sequences[answer_id], finish_reason=reason, error=error))
        self._close(answer_id)

    def _close(self, answer_id: str) -> None:
        """An answer has ended: its pages go back."""
        constraint = self._sequences.pop(answer_id).constraint
        if constraint is not None:
            constraint.owner.close(constraint)
        self.scheduler.remove(answer_id)

    def _recover(self, plan: StepPlan, error: Exception) -> None:
        """The step raised: everyone in it runs again alone; who raises again is out."""
        self.counters.failed_steps += 1
        text = f"{type(error).__name__}: {error}"
        failed = self.scheduler.fail(plan)
        logger().warning("step_failed", error=text, requests=len(plan.items), failed=failed)
        logger().debug("step_failed", traceback="".join(traceback.format_exception(error)))
        for answer_id in failed:
            self._finish(answer_id, "error", f"the step raised twice: {text}")

    def report(self, *, page_maps: bool = False) -> EngineReport:
        """Counters, queues and pools now; ``page_maps`` asks for what stands on every page."""
        return make_report(self.config.demand, self.scheduler, self._sequences, self.counters, page_maps=page_maps)
