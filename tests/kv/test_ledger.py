"""Pools, tables and the ledger: what they refuse, and that a refusal changes nothing. Without torch."""

from __future__ import annotations

import pytest
from tests.properties.naive import demand

from sash.kv.ledger.ledger import Ledger
from sash.kv.ledger.pool import PagePool
from sash.kv.ledger.table import PageTable
from sash.spec.errors import LedgerError, OutOfPagesError
from sash.spec.footprint import table_shape
from sash.spec.span import Span


def test_a_pool_hands_out_each_page_once_and_lowest_first() -> None:
    pool = PagePool(3)
    assert [pool.take(promised=False) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OutOfPagesError, match="no page is available"):
        pool.take(promised=False)
    for page in (1, 2, 0):
        pool.release(page)
    assert [pool.take(promised=False) for _ in range(3)] == [0, 1, 2], "whatever order they came back in"
    pool.check()


def test_a_shared_page_is_free_after_its_last_owner() -> None:
    pool = PagePool(2)
    page = pool.take(promised=False)
    pool.retain(page)
    pool.release(page)
    assert pool.num_free == 1
    pool.release(page)
    assert pool.num_free == 2
    with pytest.raises(LedgerError, match="page 0 is freed twice"):
        pool.release(page)
    with pytest.raises(LedgerError, match="page 0 is free and can't be shared"):
        pool.retain(page)
    pool.check()


def test_promised_pages_are_nobody_elses() -> None:
    pool = PagePool(4)
    pool.promise(3)
    with pytest.raises(OutOfPagesError, match="2 pages wanted, 1 available"):
        pool.promise(2)
    pool.take(promised=False)
    with pytest.raises(OutOfPagesError):
        pool.take(promised=False)
    pool.take(promised=True)
    pool.unpromise(2)
    assert (pool.available, pool.promised) == (2, 0)
    pool.check()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda pool: pool._free.append(pool._free[0]), "twice"),
        (lambda pool: pool._free.pop(), "disagree"),
        (lambda pool: pool.refs.__setitem__(1, 1), "disagree"),
        (lambda pool: setattr(pool, "promised", 9), "promised"),
        (lambda pool: setattr(pool, "promised", -1), "promised"),
    ],
)
def test_a_pool_notices_books_that_do_not_balance(harm: object, message: str) -> None:
    pool = PagePool(3)
    pool.take(promised=False)
    pool.check()
    harm(pool)  # type: ignore[operator]
    with pytest.raises(LedgerError, match=message):
        pool.check()


def ledger(share: float = 1, mix: tuple[str, ...] = ("window", "full"), length: int = 40) -> Ledger:
    need = demand(list(mix), page_size=4, max_model_len=length)
    return Ledger(need, tuple(int(share * n) for n in need.request_pages()))


def harm_columns(books: Ledger) -> None:
    books._tables["a"][0].columns[0] = books._tables["a"][0].columns[1]


def harm_promise(books: Ledger) -> None:
    books._tables["a"][0].promise += 1


def harm_reference(books: Ledger) -> None:
    books.pools[1].retain(books._tables["a"][1].columns[0])


def harm_size(books: Ledger) -> None:
    books._tables["a"][0].columns.extend([books.pools[0].take(promised=False) for _ in range(3)])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (harm_columns, "a page twice"),
        (harm_promise, "promised in the window pool"),
        (harm_reference, "the full pool counts references that no table has"),
        (harm_size, "pages in a table of 0 \\+ 3"),
    ],
)
def test_the_ledger_notices_tables_and_pools_that_disagree(harm: object, message: str) -> None:
    books = ledger(share=2)
    assert books.admit("a", 10, 10, 30)
    assert books.reserve("a", 0, 10) is not None
    books.check()
    harm(books)  # type: ignore[operator]
    with pytest.raises(LedgerError, match=message):
        books.check()


def test_admission_promises_windows_whole_and_full_pages_for_what_is_known() -> None:
    books = ledger()
    assert books.admit("a", 9, 9, 40)
    assert [(p.group, p.promised, p.held) for p in books.stats()] == [("window", 3, 0), ("full", 3, 0)]
    assert not books.admit("b", 2, 2, 3), "the window pool is short"
    assert "b" not in books and books.requests == ("a",)
    assert books.reserve("a", 0, 9) is not None
    assert [(p.promised, p.held, p.peak) for p in books.stats()] == [(0, 3, 3), (0, 3, 3)]
    assert books.request_pages("a") == books.private_pages("a") == {"window": 3, "full": 3}
    books.release("a")
    assert [(p.free, p.held, p.peak) for p in books.stats()] == [(3, 0, 3), (10, 0, 3)]
    books.check()


def test_a_short_request_is_promised_no_more_window_pages_than_its_tokens_need() -> None:
    books = ledger()
    assert books.admit("a", 2, 2, 4)
    assert books.stats()[0].promised == 1


def test_growth_that_finds_no_page_changes_nothing() -> None:
    books = ledger(share=2)
    assert books.admit("a", 40, 40, 40) and books.admit("b", 38, 38, 40)
    assert books.reserve("a", 0, 40) is not None and books.reserve("b", 0, 38) is not None
    books.release("a")
    assert books.admit("c", 40, 40, 40)
    before = [list(t.columns) for t in books._tables["b"]]
    assert books.reserve("b", 38, 2) is not None, "the last page has room"
    assert books._tables["b"][1].num_pages == 10 and [list(t.columns) for t in books._tables["b"]] == before
    short = ledger()
    assert short.admit("a", 3, 3, 40) and short.reserve("a", 0, 3) is not None
    short.pools[1].promise(short.pools[1].available)
    assert short.reserve("a", 3, 2) is None
    assert short.request_pages("a") == {"window": 1, "full": 1}


def test_what_could_never_run_is_told_with_its_pool() -> None:
    books = ledger(share=0.5)
    assert books.fits_ever(3, 4) is None
    assert books.fits_ever(3, 30) == "it needs 3 pages of the window pool, which has 1"
    assert ledger(mix=("full",), share=0.5).fits_ever(3, 40) == "it needs 10 pages of the full pool, which has 5"


def test_a_fork_shares_whole_full_pages_and_copies_what_will_be_written_again() -> None:
    books = ledger(share=3)
    assert books.admit("a", 10, 10, 30) and books.reserve("a", 0, 10) is not None
    copies = books.fork("a", "b", 10, 30)
    assert copies is not None
    window, full = copies
    assert [source for source, _ in window] == [p for p in books._tables["a"][0].columns if p >= 0]
    assert [source for source, _ in full] == [books._tables["a"][1].columns[2]]
    assert books.request_pages("b") == {"window": 2, "full": 3}
    assert books.private_pages("b") == {"window": 2, "full": 1}
    books.check()
    books.release("a")
    assert books.private_pages("b") == {"window": 2, "full": 3}
    books.release("b")
    books.check()
    assert [p.held for p in books.stats()] == [0, 0]


def test_a_fork_that_finds_no_page_changes_nothing() -> None:
    books = ledger()
    assert books.admit("a", 10, 10, 30) and books.reserve("a", 0, 10) is not None
    assert books.fork("a", "b", 10, 30) is None
    assert books.requests == ("a",) and books.private_pages("a") == {"window": 2, "full": 3}
    books.check()


def test_a_shared_page_goes_on_in_a_fresh_one_and_its_live_rows_are_copied_first() -> None:
    books = ledger(share=2)
    assert books.admit("a", 10, 10, 30) and books.reserve("a", 0, 10) is not None
    shared = [table.columns[2] for table in books._tables["a"]]
    for pool, page in zip(books.pools, shared, strict=True):
        pool.retain(page)  # as a kept window would
    steps = books.reserve("a", 10, 1)
    assert steps is not None
    for step, pool, page in zip(steps, books.pools, shared, strict=True):
        assert step.read[2] == page and step.write[2] != page
        assert step.copies == ((page, step.write[2]),)
        assert (pool.refs[page], pool.refs[step.write[2]]) == (1, 1)


def test_a_dead_shared_page_is_left_without_a_copy() -> None:
    books = ledger(share=2)
    assert books.admit("a", 10, 10, 30) and books.reserve("a", 0, 12) is not None
    table = books._tables["a"][0]
    last = table.columns[2]
    books.pools[0].retain(last)
    assert books.reserve("a", 12, 1) is not None and books.reserve("a", 13, 7) is not None
    steps = books.reserve("a", 20, 1)
    assert steps is not None and steps[0].copies == () and steps[0].write[2] not in (last, -1)
    assert books.pools[0].refs[last] == 1


def test_whether_a_step_can_be_repeated() -> None:
    books = ledger(length=200)
    assert books.admit("a", 100, 100, 150)
    assert books.reserve("a", 0, 30) is not None and books.repeatable("a", 0)
    assert books.reserve("a", 30, 1) is not None and books.repeatable("a", 30)
    assert books.reserve("a", 31, 40) is not None and not books.repeatable("a", 31), "the ring has gone round"


def test_a_step_whose_pinned_page_stays_can_only_be_repeated_while_the_others_do() -> None:
    bound = Span.sliding(16, sinks=2).bind(200)
    table = PageTable(PagePool(20), table_shape(bound, 4, 400), bound)
    table.reserve(0, 10)
    table.reserve(10, 6)
    assert table.repeatable(10), "its first row is pinned, the others are in the ring"
    table.reserve(16, 60)
    assert not table.repeatable(16), "rows 4 ... 15 are overwritten, whatever is pinned"
    table.reserve(76, 1)
    assert table.repeatable(76)


def test_a_page_map_tells_who_stands_where() -> None:
    books = ledger(share=2)
    assert books.page_map(1) == [("", 20, 0)]
    assert books.admit("a", 10, 10, 30) and books.reserve("a", 0, 10) is not None
    assert books.admit("b", 5, 5, 30) and books.reserve("b", 0, 5) is not None
    assert books.page_map(1) == [("a", 3, 0), ("b", 2, 0), ("", 15, 0)]
    books.release("a")
    assert books.page_map(1) == [("", 3, 0), ("b", 2, 0), ("", 15, 0)]


def test_a_page_map_numbers_pages_as_the_ring_goes_round() -> None:
    books = ledger(length=400)
    assert books.admit("a", 10, 10, 200) and books.reserve("a", 0, 1) is not None
    ring = books.pools[0].num_pages
    for row in range(1, 4 * ring + 4):  # every page of the ring, and one more
        assert books.reserve("a", row, 1) is not None
    assert books.page_map(0) == [("a", 1, ring), ("a", ring - 1, 1)]
    assert books.page_map(1)[0] == ("a", ring + 1, 0)


def test_what_slides_and_what_is_written_is_counted() -> None:
    books = ledger(share=2)
    assert books.admit("a", 10, 10, 40) and books.reserve("a", 0, 10) is not None
    window, full = books.stats()
    held, written = window.held, window.written_rows
    assert (window.slid, full.slid, full.written_rows) == (0, 0, 10)
    for row in range(10, 30):
        assert books.reserve("a", row, 1) is not None
    window, full = books.stats()
    assert window.written_rows == written + 20 and full.written_rows == 30
    # Rows 10 to 29 lie on pages 2 to 7: the table has no room for more than it held, so each newer page took one over.
    assert window.slid == 7 - 2 - (window.held - held) and full.slid == 0
