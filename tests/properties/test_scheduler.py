"""Scheduler and ledger under random arrivals, cancels, preemptions, failures and forks; settle may lag by a step."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from tests.properties.naive import NaivePages, demand

from sash.kv.ledger.ledger import Ledger
from sash.scheduler.plan import StepPlan
from sash.scheduler.scheduler import Scheduler, Ticket

MIXES = [["window", "full"], ["full"], ["sinks", "chunk", "full"], ["reference", "window"], ["prefill", "odd chunk"]]
MAX_LEN = 90


class Machine:
    """Runs plans on named rows; ``lag`` settles a plan only after the next one is made."""

    def __init__(self, mix: list[str], seed: int, lag: bool) -> None:
        self.rng = random.Random(seed)
        self.page = self.rng.choice([1, 4, 5])
        self.slack = self.rng.choice([0, 3, 8])
        need = demand(mix, page_size=self.page, max_model_len=MAX_LEN, slack=self.slack)
        share = self.rng.choice([1, 1.3, 3])
        self.ledger = Ledger(need, tuple(int(share * n) for n in need.request_pages()))
        self.pages = NaivePages(self.ledger, self.page)
        self.seats, self.budget = self.rng.choice([1, 3, 6]), self.rng.choice([8, 20])
        self.chunk = self.rng.choice([1, 5, self.budget])
        self.scheduler = Scheduler(
            self.ledger, max_num_seqs=self.seats, max_batched_tokens=self.budget, chunk=self.chunk
        )
        self.lag, self.flying = lag, list[StepPlan]()
        self.limits: dict[str, int] = {}
        self.ended: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.arrivals = 0

    def add(self) -> None:
        prompt = self.rng.choice([1, 2, self.page, 13, 30, 60])
        answer = self.rng.randint(1, MAX_LEN - prompt)
        n = self.rng.choice([1, 1, 1, 3])
        tickets = []
        for i in range(n):
            name = f"r{self.arrivals}" if i == 0 else f"{tickets[0].request_id}#{i}"
            tickets.append(Ticket(name, self.arrivals, prompt, prompt + answer - 1))
            self.limits[name] = prompt + answer
            self.arrivals += 1
        assert self.ledger.fits_ever(prompt, prompt + answer - 1) is None
        tickets[0].siblings = tickets[1:]
        self.scheduler.add(tickets[0])

    def end(self, name: str, reason: str) -> None:
        self.scheduler.remove(name)
        assert self.scheduler.find(name) is None and name not in self.ledger
        self.ended[name] += 1
        self.reasons[reason] += 1
        del self.limits[name]

    def step(self) -> None:
        if self.limits and self.rng.random() < 0.04:
            self.end(self.rng.choice(list(self.limits)), "cancelled")
            self.scheduler.check()
        if self.scheduler.running and self.rng.random() < 0.03:
            self.scheduler.preempt(self.rng.choice(self.scheduler.running))
            self.reasons["preempted"] += 1
            self.scheduler.check()
        for ticket in self.scheduler.running:
            ticket.drafts = self.rng.randint(0, self.slack)
        plan = self.scheduler.schedule()
        self.scheduler.check()
        if plan is not None:
            self.judge(plan)
            self.flying.append(plan)
        elif not self.flying:
            assert not self.limits, "nothing runs though requests wait"
        # Guesses need the newest token, so with drafts all is settled now and then.
        catch_up = self.slack > 0 and self.rng.random() < 0.4
        while len(self.flying) > (self.lag and plan is not None and not catch_up):
            self.finish(self.flying.pop(0))

    def judge(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.budget
        assert all(0 < item.count - item.num_drafts <= self.chunk for item in plan.items)
        self.reasons["drafted"] += sum(item.num_drafts > 0 for item in plan.items)
        assert len({item.request_id for item in plan.items}) == len(plan.items) <= len(self.scheduler.running)
        assert len(self.scheduler.running) <= self.seats
        for item in plan.items:
            limit = self.limits[item.request_id]
            assert item.end < limit, "a row past the last token is computed"
            assert item.num_drafts <= self.slack and (item.samples or not item.num_drafts)
            self.pages.assert_not_shared(item.tables, item.start, item.end, len(item.forks))
        alone = [t for t in self.scheduler.running if t.alone and any(i.request_id == t.request_id for i in plan.items)]
        assert not alone or len(plan.items) == 1, "who must run alone has company"
        assert not alone or not plan.items[0].num_drafts, "who must run alone has drafts"

    def finish(self, plan: StepPlan) -> None:
        """Run a plan, or let it raise before or after its writes; then tell the scheduler."""
        fails = not self.lag and self.rng.random() < 0.06
        accepted = {item.request_id: self.rng.randint(0, item.num_drafts) for item in plan.items if item.num_drafts}
        if not fails or self.rng.random() < 0.5:
            for item in plan.items:
                right = item.newest + 1 + accepted.get(item.request_id, 0)
                self.pages.run(item.request_id, item.tables, item.start, item.end, right)
        if fails:
            self.reasons["step failed"] += 1
            for name in self.scheduler.fail(plan):
                self.end(name, "failed")
        else:
            self.pages.copy(plan.copies_after)
            self.scheduler.settle(plan, accepted)
            for item in plan.items:
                for name in (item.request_id, *item.forks):
                    ticket = self.scheduler.find(name)
                    if ticket is not None and item.num_drafts and ticket.computed > item.start:
                        assert ticket.scheduled == ticket.known - 1, "the next row is not the newest token's"
                    if ticket is not None and ticket.known >= self.limits[name]:
                        assert ticket.known == self.limits[name]
                        self.end(name, "length")
        self.scheduler.check()
        if not self.lag:
            self.pages.forget_free_pages()
            for ticket in self.scheduler.running:
                self.pages.assert_retained(ticket.request_id, ticket.scheduled)


@pytest.mark.parametrize("lag", [False, True], ids=["in step", "lagging"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mix", MIXES, ids="+".join)
def test_every_request_ends_once_and_all_pages_return(mix: list[str], seed: int, lag: bool) -> None:
    machine = Machine(mix, seed, lag)
    for _ in range(120):
        if len(machine.limits) < 12 and machine.rng.random() < 0.4:
            machine.add()
        machine.step()
    for _ in range(20_000):
        if not machine.limits and not machine.flying:
            break
        machine.step()
    assert not machine.limits, f"requests never end: {list(machine.limits)}"
    assert machine.ended.total() == machine.arrivals and set(machine.ended.values()) == {1}
    assert machine.reasons["length"] > 0 and (machine.reasons["drafted"] > 0) == (machine.slack > 0)
    machine.scheduler.check()
    for pool in machine.ledger.stats():
        assert (pool.free, pool.held, pool.promised) == (pool.total, 0, 0)
