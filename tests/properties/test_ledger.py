"""The ledger under thousands of random operations: books balance, rows stay where tables say, nothing is lost."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from tests.properties.naive import NaivePages, demand

from sash.kv.ledger.ledger import Ledger
from sash.kv.ledger.table import EMPTY
from sash.spec.span import Span

MIXES = [
    ["window", "full"],
    ["full"],
    ["window", "sinks", "full"],
    ["chunk", "odd chunk", "full"],
    ["reference", "full"],
    ["wide", "narrow"],
    ["prefill", "window"],
    ["reference", "sinks", "chunk", "full", "window"],
]
MAX_LEN = 120


@dataclass
class Live:
    """A request that has tables."""

    name: str
    prompt: int
    limit: int
    done: int = 0


class Machine:
    """Random operations on one ledger, each followed by every check."""

    def __init__(self, mix: list[str], seed: int) -> None:
        self.rng = random.Random(seed)
        self.page = self.rng.choice([1, 3, 4, 8])
        self.slack = self.rng.choice([0, 1, 4, 9])
        need = demand(
            mix,
            page_size=self.page,
            max_model_len=MAX_LEN,
            ratio=self.rng.choice([0.0, 0.4, 1.0, 1.0, 1.0]),
            slack=self.slack,
        )
        self.bounded = all(g.bounded for g in need.groups)
        share = self.rng.choice([1, 2, 3])
        self.ledger = Ledger(need, tuple(share * n for n in need.request_pages()))
        self.pages = NaivePages(self.ledger, self.page)
        self.live: dict[str, Live] = {}
        self.count = 0
        self.done: dict[str, int] = {}

    def snapshot(self) -> object:
        tables = {r: [[*t.columns, t.promise] for t in ts] for r, ts in self.ledger._tables.items()}
        return tables, [(list(p.refs), p.promised, p.num_free) for p in self.ledger.pools]

    def step(self) -> None:
        action = self.rng.choices(("admit", "reserve", "fork", "release"), (3, 12, 2, 1))[0]
        if action == "admit" or not self.live:
            worked = self.admit()
        else:
            worked = getattr(self, action)(self.rng.choice(list(self.live.values())))
        self.done[action] = self.done.get(action, 0) + worked
        self.ledger.check()
        self.pages.forget_free_pages()
        for i in range(len(self.ledger.groups)):
            self.assert_mapped(i)

    def assert_mapped(self, index: int) -> None:
        """The page map names the oldest owner of every page, and of each page that can be seen its place."""
        runs = self.ledger.page_map(index)
        cells = [(owner, number + i) for owner, pages, number in runs for i in range(pages)]
        owners = [""] * self.ledger.pools[index].num_pages
        for name, tables in reversed(self.ledger._tables.items()):
            table = tables[index]
            for page in table.columns:
                if page != EMPTY:
                    owners[page] = name
            end = self.live[name].done
            for position in range(table.bound.retained_from(end), end):
                page = table.columns[table.shape.column(position // self.page)]
                assert cells[page][1] == position // self.page
        assert [owner for owner, _ in cells] == owners

    def admit(self) -> bool:
        self.count += 1
        prompt = self.rng.choice([1, 2, self.page, self.page + 1, 17, 40])
        one = Live(f"r{self.count}", prompt, self.rng.randint(prompt, MAX_LEN))
        assert self.ledger.fits_ever(prompt, one.limit) is None
        before = self.snapshot()
        if not self.ledger.admit(one.name, prompt, prompt, one.limit):
            assert self.snapshot() == before and self.live, "an empty ledger admits what fits"
            return False
        self.live[one.name] = one
        return True

    def reserve(self, one: Live) -> bool:
        if one.done == one.limit:
            return self.release(one)
        count = self.rng.randint(1, min(one.limit - one.done, self.rng.choice([1, 1, self.page, 30])))
        if one.done < one.prompt:
            count = min(count, one.prompt - one.done)
        drafts = one.done >= one.prompt and self.slack > 0 and self.rng.random() < 0.7
        if drafts:
            count = 1 + self.rng.randint(0, min(self.slack, one.limit - one.done - 1))
        before = self.snapshot()
        tables = self.ledger.reserve(one.name, one.done, count)
        if tables is None:
            assert self.snapshot() == before and not self.bounded and one.done >= one.prompt
            return False
        end = one.done + count
        accepted = self.rng.randint(one.done + 1, end) if drafts else end
        self.pages.assert_not_shared(tables, one.done, end)
        self.pages.run(one.name, tables, one.done, end, accepted)
        if drafts and self.rng.random() < 0.2:
            # The step is run once more, with other drafts or none.
            assert self.ledger.repeatable(one.name, one.done)
            self.done["repeat"] = self.done.get("repeat", 0) + 1
            self.pages.assert_retained(one.name, one.done)
            return True
        self.done["rollback"] = self.done.get("rollback", 0) + (accepted < end)
        one.done = accepted
        self.pages.assert_retained(one.name, accepted)
        if not one.done % 7:
            for other in self.live.values():
                self.pages.assert_retained(other.name, other.done)
        return True

    def fork(self, one: Live) -> bool:
        if one.done != one.prompt:
            return False
        self.count += 1
        family = one.name.split("#")[0]
        twin = Live(f"{family}#{self.count}", one.prompt, self.rng.randint(one.prompt, MAX_LEN), one.prompt)
        before = self.snapshot()
        copies = self.ledger.fork(one.name, twin.name, one.done, twin.limit)
        if copies is None:
            assert self.snapshot() == before
            return False
        self.pages.copy(copies)
        self.live[twin.name] = twin
        for name in (one.name, twin.name):
            self.pages.assert_retained(name, one.prompt)
        return True

    def release(self, one: Live) -> bool:
        self.ledger.release(one.name)
        del self.live[one.name]
        assert one.name not in self.ledger
        return True


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mix", MIXES, ids="+".join)
def test_random_operations_keep_the_books_and_the_rows(mix: list[str], seed: int) -> None:
    machine = Machine(mix, seed)
    for _ in range(300):
        machine.step()
    assert machine.done["reserve"] > 60 and machine.done["admit"] > 2, machine.done
    assert not machine.slack or (machine.done["rollback"] > 5 and machine.done["repeat"] > 2), machine.done
    for one in list(machine.live.values()):
        machine.release(one)
    machine.ledger.check()
    for pool, group in zip(machine.ledger.stats(), machine.ledger.groups, strict=True):
        assert (pool.free, pool.held, pool.promised) == (pool.total, 0, 0)
        # A window of 1 sees nothing but the query itself, so no row is ever kept.
        assert pool.peak <= pool.total and (pool.peak > 0 or group.span == Span.sliding(1))


def test_the_rows_that_survive_are_the_ring_and_the_pinned_pages() -> None:
    """Exactly: pages of sinks whole, then the ring's last rows: each replaces the one a ring before it."""
    need = demand(["sinks", "window", "full"], page_size=4, max_model_len=MAX_LEN)
    ledger = Ledger(need, need.request_pages())
    pages = NaivePages(ledger, 4)
    ledger.admit("a", 30, 30, 100)
    for start in range(100):
        tables = ledger.reserve("a", start, 1)
        assert tables is not None
        pages.run("a", tables, start, start + 1)
        end = start + 1
        # Sinks 5 pin two pages of 4 rows; windows of 6 and 7 need rings of three pages.
        assert pages.survivors("a", 0) == set(range(min(8, end))) | set(range(max(8, end - 12), end))
        assert pages.survivors("a", 1) == set(range(max(0, end - 12), end))
        assert pages.survivors("a", 2) == set(range(end))
    assert ledger.request_pages("a") == {"sinks": 5, "window": 3, "full": 25}


@pytest.mark.parametrize("page", [1, 3, 4])
@pytest.mark.parametrize("name", ["window", "narrow", "sinks", "chunk", "odd chunk", "reference"])
def test_a_slack_of_the_drafts_is_enough_and_less_loses_a_row(name: str, page: int) -> None:
    """Every step writes its row and ``drafts`` wrong ones, all of them far past the wrapped window."""

    def lost(slack: int, drafts: int) -> bool:
        need = demand([name], page_size=page, max_model_len=MAX_LEN, slack=slack)
        ledger = Ledger(need, need.request_pages())
        pages = NaivePages(ledger, page)
        ledger.admit("a", 1, 1, MAX_LEN)
        for start in range(MAX_LEN - drafts):
            tables = ledger.reserve("a", start, 1 + drafts)
            assert tables is not None
            try:
                pages.run("a", tables, start, start + 1 + drafts, start + 1)
                pages.assert_retained("a", start + 1)
            except AssertionError:
                return True
        return False

    for drafts in (1, 2, 5, 8):
        assert not lost(drafts, drafts)
    # A whole page more than the slack covers; a window of 1 sees no other row.
    assert lost(0, 2 * page + 1) == (name != "narrow")


def test_a_chunk_writes_only_what_a_later_query_can_see() -> None:
    need = demand(["window", "narrow", "odd chunk", "full"], page_size=4, max_model_len=MAX_LEN)
    ledger = Ledger(need, need.request_pages())
    pages = NaivePages(ledger, 4)
    ledger.admit("a", 50, 50, 100)
    tables = ledger.reserve("a", 0, 50)
    assert tables is not None
    pages.run("a", tables, 0, 50)
    assert pages.survivors("a", 0) == set(range(44, 50))
    assert pages.survivors("a", 1) == set()
    assert pages.survivors("a", 2) == {49}
    assert pages.survivors("a", 3) == set(range(50))
