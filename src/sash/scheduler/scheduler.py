"""Scheduler: which requests run, how many of their tokens, on which pages. Never sees a token's value."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace

from sash.kv.ledger.ledger import Ledger
from sash.kv.ledger.table import TableStep
from sash.scheduler.plan import StepItem, StepPlan
from sash.spec.errors import LedgerError


@dataclass(slots=True, eq=False)
class Ticket:
    """A request as the scheduler knows it: counts only.

    ``max_tokens`` bounds the rows: prompt and answer without its last token, whose row is never
    computed. ``known`` tokens exist (prompt and settled answer); ``scheduled`` rows are in a plan
    or done, ``computed`` are done. ``unsettled`` tokens are being sampled. ``drafts`` tokens are guessed
    for the next step, after the newest. Until it has computed ``alone_until`` rows a request runs by
    itself: its step has failed once. ``siblings`` share the prompt and start from its last row.
    """

    request_id: str
    arrival: int
    prompt_tokens: int
    max_tokens: int
    known: int = 0
    scheduled: int = 0
    computed: int = 0
    unsettled: int = 0
    drafts: int = 0
    alone_until: int = 0
    preemptions: int = 0
    siblings: list[Ticket] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known = self.known or self.prompt_tokens

    @property
    def remaining(self) -> int:
        """Rows that could be scheduled now; the last token's row is never needed. None while drafts are checked."""
        return max(min(self.known + self.unsettled, self.max_tokens) - self.scheduled, 0)

    @property
    def decoding(self) -> bool:
        """Whether only the newest token's row is missing."""
        return self.remaining == 1 and self.scheduled >= self.prompt_tokens

    @property
    def alone(self) -> bool:
        """Whether the request must run by itself."""
        return self.computed < self.alone_until


def _arrival(ticket: Ticket) -> int:
    return ticket.arrival


class Scheduler:
    """Continuous batching: every decoding request first, then prefill chunks, then admissions.

    Order is arrival order everywhere: the oldest waiting request is admitted first (nobody overtakes
    it, so it can't starve), and when pages run out the youngest running one is preempted: its pages
    are freed and its tokens recomputed later. A step holds at most ``max_batched_tokens`` rows and
    at most ``chunk`` rows of one prompt. ``settle`` may lag behind ``schedule`` by one step. Drafts get
    what rows and pages are to spare: nobody waits or gives way for their sake.
    """

    def __init__(self, ledger: Ledger, *, max_num_seqs: int, max_batched_tokens: int, chunk: int) -> None:
        self.ledger = ledger
        self._max_num_seqs = max_num_seqs
        self._max_batched_tokens = max_batched_tokens
        self._chunk = chunk
        self.waiting: list[Ticket] = []
        self.running: list[Ticket] = []
        self.num_preemptions = 0

    def add(self, ticket: Ticket) -> None:
        """Queue a request; the caller has checked ``ledger.fits_ever``."""
        insort(self.waiting, ticket, key=_arrival)

    def _all(self) -> Iterator[Ticket]:
        for ticket in (*self.running, *self.waiting):
            yield ticket
            yield from ticket.siblings

    def find(self, request_id: str) -> Ticket | None:
        """The request of that name, running, queued or waiting for its sibling's prompt."""
        return next((t for t in self._all() if t.request_id == request_id), None)

    def remove(self, request_id: str) -> None:
        """Take a request out, whatever its state, and free its pages; unknown names are ignored."""
        for ticket in (*self.running, *self.waiting):
            if ticket.request_id == request_id:
                (self.running if ticket in self.running else self.waiting).remove(ticket)
                self._promote_siblings(ticket)
                if request_id in self.ledger:
                    self.ledger.release(request_id)
                return
            ticket.siblings = [s for s in ticket.siblings if s.request_id != request_id]

    def _promote_siblings(self, ticket: Ticket) -> None:
        """Siblings that could not start from this request's prompt: the first computes it for the rest."""
        if ticket.siblings:
            heir, *rest = ticket.siblings
            heir.siblings, ticket.siblings = rest, []
            self.add(heir)

    def preempt(self, ticket: Ticket) -> None:
        """Free a running request's pages and queue it again; all its tokens will be recomputed."""
        self.running.remove(ticket)
        self.ledger.release(ticket.request_id)
        ticket.scheduled = ticket.computed = 0
        ticket.preemptions += 1
        self.num_preemptions += 1
        self.add(ticket)

    def schedule(self) -> StepPlan | None:
        """The next step with its pages reserved, or None when nothing can run."""
        items: list[StepItem] = []
        if not self._schedule_alone(items):
            preempted = self._schedule_decodes(items)
            self._schedule_prefills(items, admit=not preempted)
        if not items:
            return None
        copies: list[list[tuple[int, int]]] = [[] for _ in self.ledger.groups]
        return StepPlan(tuple(self._fork(item, copies) for item in items), tuple(tuple(c) for c in copies))

    def _schedule_alone(self, items: list[StepItem]) -> bool:
        """A step for the first request that must run by itself, if there is one and it has pages."""
        for ticket in (*self.running, *self.waiting):
            if ticket.alone and (ticket in self.running or self._admit(ticket)):
                if ticket.decoding:
                    self._reserve_or_preempt(ticket, items)
                else:
                    self._schedule_chunk(ticket, self._max_batched_tokens, items)
                return bool(items)
        return False

    def _schedule_decodes(self, items: list[StepItem]) -> bool:
        """Rows of all decoding requests, oldest first; True when one had to be preempted."""
        before = self.num_preemptions
        room = self._draft_room()
        for ticket in list(self.running):
            if ticket in self.running and ticket.decoding:
                self._reserve_or_preempt(ticket, items, room - sum(item.num_drafts for item in items))
        return self.num_preemptions > before

    def _draft_room(self) -> int:
        """Rows that drafts may take in a step: half of what single rows leave where prompts wait, else all of it."""
        decoding = sum(ticket.decoding for ticket in self.running)
        room = self._max_batched_tokens - decoding
        return room // 2 if self.waiting or decoding < len(self.running) else room

    def _reserve_or_preempt(self, ticket: Ticket, items: list[StepItem], room: int = 0) -> None:
        """One row of a decoding request and at most ``room`` drafts; for the one row the youngest others, at last
        itself, give way."""
        drafts = 0 if ticket.unsettled else min(ticket.drafts, room, ticket.max_tokens - ticket.known)
        ticket.drafts = 0
        if drafts > 0:
            # Each of the others may need a page for its row.
            leave = len(self.running)
            tables = self.ledger.reserve(ticket.request_id, ticket.scheduled, 1 + drafts, leave)
            if tables is not None:
                items.append(self._item(ticket, 1, tables, drafts))
                return
        while ticket in self.running:
            tables = self.ledger.reserve(ticket.request_id, ticket.scheduled, 1)
            if tables is not None:
                items.append(self._item(ticket, 1, tables))
                return
            self.preempt(self.running[-1])

    def _schedule_prefills(self, items: list[StepItem], *, admit: bool) -> None:
        budget = self._max_batched_tokens - sum(item.count for item in items)
        done = {item.request_id for item in items}
        for ticket in list(self.running):
            if budget and ticket.remaining and ticket.request_id not in done:
                budget -= self._schedule_chunk(ticket, budget, items)
        while admit and budget and self.waiting and not self.waiting[0].alone:
            ticket = self.waiting[0]
            if not self._admit(ticket):
                return
            budget -= self._schedule_chunk(ticket, budget, items)

    def _admit(self, ticket: Ticket) -> bool:
        """Move a queued request into the running set if a seat and pages are there."""
        if len(self.running) >= self._max_num_seqs:
            return False
        if not self.ledger.admit(ticket.request_id, ticket.prompt_tokens, ticket.known, ticket.max_tokens):
            return False
        self.waiting.remove(ticket)
        insort(self.running, ticket, key=_arrival)
        return True

    @property
    def lack(self) -> str:
        """What the first waiting request lacks: seats, pages, or its turn."""
        if not self.waiting:
            return "turn"
        if len(self.running) >= self._max_num_seqs:
            return "seats"
        ticket = self.waiting[0]
        room = self.ledger.has_room(ticket.prompt_tokens, ticket.known, ticket.max_tokens)
        return "turn" if room else "pages"

    def _schedule_chunk(self, ticket: Ticket, budget: int, items: list[StepItem]) -> int:
        """A chunk of at most ``budget`` rows; returns its rows. Admission has promised its pages."""
        count = min(ticket.remaining, self._chunk, budget)
        tables = self.ledger.reserve(ticket.request_id, ticket.scheduled, count)
        if tables is None:
            return 0
        items.append(self._item(ticket, count, tables))
        return count

    def _item(self, ticket: Ticket, count: int, tables: tuple[TableStep, ...], drafts: int = 0) -> StepItem:
        item = StepItem(
            ticket.request_id,
            ticket.scheduled,
            count + drafts,
            count == ticket.remaining,
            tables,
            num_drafts=drafts,
        )
        ticket.scheduled += item.count
        ticket.unsettled += item.samples
        return item

    def _fork(self, item: StepItem, copies: list[list[tuple[int, int]]]) -> StepItem:
        """Let siblings start from the prompt's last row as far as seats and pages go."""
        ticket = self.find(item.request_id)
        if ticket is None or not ticket.siblings or item.end != ticket.prompt_tokens:
            return item
        forked: list[Ticket] = []
        for sibling in ticket.siblings:
            if len(self.running) >= self._max_num_seqs:
                break
            pages = self.ledger.fork(ticket.request_id, sibling.request_id, item.end, sibling.max_tokens)
            if pages is None:
                break
            for all_copies, more in zip(copies, pages, strict=True):
                all_copies.extend(more)
            sibling.scheduled, sibling.unsettled = item.end, 1
            insort(self.running, sibling, key=_arrival)
            forked.append(sibling)
        ticket.siblings = ticket.siblings[len(forked) :]
        self._promote_siblings(ticket)
        return replace(item, forks=tuple(t.request_id for t in forked))

    def settle(self, plan: StepPlan, accepted: Mapping[str, int] | None = None, late: Set[str] = frozenset()) -> None:
        """The step is done: its rows count as computed and its sampled tokens as known.

        ``accepted`` says by request how many of its drafts were right; the rows of the others are given up.
        ``late`` are requests of a single row that could not draw their token yet: they compute it again.
        """
        for item in plan.items:
            if item.request_id in late:
                self._settle_late(item)
                continue
            if item.num_drafts:
                self._settle_drafts(item, (accepted or {}).get(item.request_id, 0))
                continue
            for request_id in (item.request_id, *item.forks):
                ticket = self.find(request_id)
                if ticket is None:
                    continue
                if ticket.scheduled >= item.end:
                    ticket.computed = item.end
                ticket.known += item.samples
                ticket.unsettled -= item.samples

    def _settle_drafts(self, item: StepItem, accepted: int) -> None:
        ticket = self.find(item.request_id)
        if ticket is None:
            return
        if ticket.computed == item.start:  # else it was preempted meanwhile
            ticket.scheduled = ticket.computed = item.newest + 1 + accepted
        ticket.known += 1 + accepted
        ticket.unsettled -= 1

    def _settle_late(self, item: StepItem) -> None:
        ticket = self.find(item.request_id)
        if ticket is not None:
            ticket.unsettled -= 1
            if ticket.scheduled == item.end:  # else it was preempted meanwhile
                ticket.scheduled = ticket.computed = item.start

    def fail(self, plan: StepPlan, *, blame: bool = True) -> list[str]:
        """The step raised. Requests run again, each alone and once: from the same row where every
        row they need is still there, else from position 0. Returns those that had already run alone;
        the caller removes them. Without ``blame`` (the step was interrupted) all just run again.
        """
        failed: list[str] = []
        for item in plan.items:
            for request_id in item.forks:
                self._unfork(request_id)
            ticket = self.find(item.request_id)
            if ticket is None:
                continue
            if blame and ticket.alone:
                failed.append(item.request_id)
                continue
            ticket.unsettled -= item.samples
            if blame:
                ticket.alone_until = item.newest + 1
            if self.ledger.repeatable(item.request_id, item.start):
                ticket.scheduled = item.start
            else:
                self.preempt(ticket)
        return failed

    def _unfork(self, request_id: str) -> None:
        """A fork whose first row failed computes the prompt by itself."""
        ticket = self.find(request_id)
        if ticket is not None:
            ticket.unsettled = 0
            self.preempt(ticket)

    def check(self) -> None:
        """Books of the ledger, and that exactly the running requests have tables.

        Raises:
            LedgerError: what doesn't balance.
        """
        self.ledger.check()
        tabled, running = set(self.ledger.requests), {t.request_id for t in self.running}
        if tabled != running:
            raise LedgerError(f"tables of {tabled ^ running} don't match the running requests")
