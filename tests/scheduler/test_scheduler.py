"""Order, budget and recovery of the scheduler, on counts alone. Without torch."""

from __future__ import annotations

import pytest
from tests.properties.naive import demand

from sash.kv.ledger.ledger import Ledger
from sash.scheduler.plan import StepPlan
from sash.scheduler.scheduler import Scheduler, Ticket


def scheduler(full_pages: int = 40, seats: int = 4, budget: int = 16, chunk: int = 8, slack: int = 0) -> Scheduler:
    need = demand(["window", "full"], page_size=4, max_model_len=40, slack=slack)
    return Scheduler(Ledger(need, (16, full_pages)), max_num_seqs=seats, max_batched_tokens=budget, chunk=chunk)


def add(plans: Scheduler, *prompts: int, rows: int = 40) -> list[Ticket]:
    tickets = [Ticket(f"r{i}", i, prompt, rows) for i, prompt in enumerate(prompts)]
    for ticket in tickets:
        plans.add(ticket)
    return tickets


def step(plans: Scheduler) -> list[tuple[str, int, int, bool]]:
    """Schedule and settle; the plan's items as (request, start, count, samples)."""
    plan = plans.schedule()
    assert plan is not None
    plans.settle(plan)
    plans.check()
    return items(plan)


def items(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(i.request_id, i.start, i.count, i.samples) for i in plan.items]


def test_decodes_first_then_chunks_in_order_of_arrival_within_the_budget() -> None:
    plans = scheduler()
    add(plans, 3, 20, 20)
    assert step(plans) == [("r0", 0, 3, True), ("r1", 0, 8, False), ("r2", 0, 5, False)]
    assert step(plans) == [("r0", 3, 1, True), ("r1", 8, 8, False), ("r2", 5, 7, False)]
    assert step(plans) == [("r0", 4, 1, True), ("r1", 16, 4, True), ("r2", 12, 8, True)]
    assert step(plans) == [("r0", 5, 1, True), ("r1", 20, 1, True), ("r2", 20, 1, True)]


def test_nothing_to_do() -> None:
    assert scheduler().schedule() is None


def test_seats_are_given_in_order_of_arrival() -> None:
    plans = scheduler(seats=1)
    first, second = add(plans, 4, 4)
    assert step(plans) == [("r0", 0, 4, True)] and plans.waiting == [second]
    plans.remove("r0")
    assert plans.find("r0") is None and step(plans) == [("r1", 0, 4, True)]
    assert first not in plans.running


def test_the_youngest_gives_way_and_comes_back_in_its_old_place() -> None:
    plans = scheduler(15, budget=40, chunk=40)
    add(plans, 23, 24, 3)
    while not plans.num_preemptions:
        step(plans)
    assert [t.request_id for t in plans.running] == ["r0", "r1"], "the youngest goes"
    while plans.find("r1") in plans.running:
        step(plans)
    assert [t.request_id for t in plans.running] == ["r0"]
    assert [t.request_id for t in plans.waiting] == ["r1", "r2"], "queued again in order of arrival"
    assert plans.waiting[0].preemptions == 1 and plans.waiting[0].computed == 0
    assert plans.waiting[0].known > 24, "its tokens are kept"


def test_no_row_is_scheduled_past_the_last_token_though_settle_lags() -> None:
    plans = scheduler()
    plans.add(Ticket("a", 0, 3, 5))
    flying = []
    for wanted in ([("a", 0, 3, True)], [("a", 3, 1, True)], [("a", 4, 1, True)]):
        plan = plans.schedule()
        assert plan is not None and items(plan) == wanted
        flying.append(plan)
        if len(flying) > 1:
            plans.settle(flying.pop(0))
    assert plans.schedule() is None
    plans.settle(flying.pop())
    assert plans.schedule() is None and plans.running[0].known == 6


def test_a_failed_step_runs_again_one_by_one_and_only_the_second_failure_counts() -> None:
    plans = scheduler()
    add(plans, 3, 8)
    plan = plans.schedule()
    assert plan is not None and plans.fail(plan) == []
    plan = plans.schedule()
    assert plan is not None and items(plan) == [("r0", 0, 3, True)]
    plans.settle(plan)
    plan = plans.schedule()
    assert plan is not None and items(plan) == [("r1", 0, 8, True)]
    assert plans.fail(plan) == ["r1"]
    plans.remove("r1")
    assert step(plans) == [("r0", 3, 1, True)]


def test_siblings_start_from_the_prompts_last_row() -> None:
    plans = scheduler(chunk=4)
    ticket = Ticket("a", 0, 6, 20)
    ticket.siblings = [Ticket("a#1", 1, 6, 20), Ticket("a#2", 2, 6, 20)]
    plans.add(ticket)
    assert plans.find("a#2") is not None
    first = plans.schedule()
    assert first is not None and not first.items[0].forks
    plans.settle(first)
    second = plans.schedule()
    assert second is not None and second.items[0].forks == ("a#1", "a#2")
    assert [len(c) for c in second.copies_after] == [4, 2], "two window pages and one partial full page each"
    plans.settle(second)
    assert step(plans) == [("a", 6, 1, True), ("a#1", 6, 1, True), ("a#2", 6, 1, True)]


# ---------------------------------------------------------------------------------------------- drafts


def drafted(plans: Scheduler, **drafts: int) -> StepPlan:
    """Schedule with so many drafts by request."""
    for ticket in plans.running:
        ticket.drafts = drafts.get(ticket.request_id, 0)
    plan = plans.schedule()
    assert plan is not None
    return plan


def counts(plan: StepPlan) -> list[tuple[str, int, int, int]]:
    """(request, start, rows, drafts) of each item."""
    return [(i.request_id, i.start, i.count, i.num_drafts) for i in plan.items]


def test_a_request_goes_on_behind_its_last_right_draft() -> None:
    plans = scheduler(slack=4)
    add(plans, 6, 3)
    step(plans)
    plan = drafted(plans, r0=4, r1=2)
    assert counts(plan) == [("r0", 6, 5, 4), ("r1", 3, 3, 2)]
    plans.settle(plan, {"r0": 1, "r1": 2})
    assert [(t.known, t.scheduled, t.computed) for t in plans.running] == [(9, 8, 8), (7, 6, 6)]
    plan = drafted(plans, r1=3)
    assert counts(plan) == [("r0", 8, 1, 0), ("r1", 6, 4, 3)]
    plans.settle(plan)
    assert [(t.known, t.computed) for t in plans.running] == [(10, 9), (8, 7)]
    plans.check()


def test_drafts_end_with_the_answer_and_wait_for_what_is_not_settled() -> None:
    plans = scheduler(slack=8)
    plans.add(Ticket("a", 0, 3, 7))
    first = plans.schedule()
    assert first is not None
    plans.settle(first)
    plan = drafted(plans, a=8)
    assert counts(plan) == [("a", 3, 4, 3)], "the last token's row is never computed"
    assert plans.running[0].remaining == 0 and plans.schedule() is None
    plans.settle(plan, {"a": 1})
    flying = drafted(plans)
    assert counts(flying) == [("a", 5, 1, 0)]
    assert counts(drafted(plans, a=3)) == [("a", 6, 1, 0)], "the newest token isn't known"


@pytest.mark.parametrize(("full_pages", "drafts"), [(5, 0), (6, 0), (7, 8)])
def test_drafts_leave_a_page_for_everybody(full_pages: int, drafts: int) -> None:
    """Two pages of 4 rows are held. r0's row and 8 drafts need three more, r1's row one, and nobody gives way."""
    plans = scheduler(full_pages, slack=8)
    add(plans, 4, 4)
    step(plans)
    assert counts(drafted(plans, r0=8)) == [("r0", 4, 1 + drafts, drafts), ("r1", 4, 1, 0)]
    assert plans.num_preemptions == 0


def test_after_a_failure_one_row_alone_is_enough() -> None:
    plans = scheduler(slack=4)
    add(plans, 6, 3)
    step(plans)
    plan = drafted(plans, r0=4, r1=2)
    assert plans.fail(plan) == []
    for wanted in (("r0", 6, 1, 0), ("r1", 3, 1, 0)):
        plan = drafted(plans, r0=4, r1=2)
        assert counts(plan) == [wanted]
        plans.settle(plan)
    assert counts(drafted(plans, r0=4, r1=2)) == [("r0", 7, 5, 4), ("r1", 4, 3, 2)]


@pytest.mark.parametrize("name", ["a", "a#1", "a#2", "nobody"])
def test_a_queued_family_loses_one_and_keeps_the_rest(name: str) -> None:
    plans = scheduler()
    ticket = Ticket("a", 0, 6, 20)
    ticket.siblings = [Ticket("a#1", 1, 6, 20), Ticket("a#2", 2, 6, 20)]
    plans.add(ticket)
    plans.remove(name)
    left = [n for n in ("a", "a#1", "a#2") if n != name]
    assert [n for n in left if plans.find(n)] == left and plans.find(name) is None
    plan = plans.schedule()
    assert plan is not None and [plan.items[0].request_id, *plan.items[0].forks] == left


def test_the_check_notices_a_running_request_without_tables() -> None:
    plans = scheduler()
    add(plans, 3)
    step(plans)
    plans.ledger.release("r0")
    with pytest.raises(AssertionError, match="don't match the running requests"):
        plans.check()
