"""Ledger: all pools and all tables of an engine. Joint operations wholly succeed or change nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from sash.kv.ledger.maps import Run, page_runs
from sash.kv.ledger.pool import PagePool
from sash.kv.ledger.table import EMPTY, PageTable, TableStep
from sash.spec.errors import LedgerError
from sash.spec.groups import GroupSpec
from sash.spec.sizing import Demand


@dataclass(frozen=True, slots=True)
class PoolStats:
    """One pool at one moment, in pages. ``free`` includes ``promised``; ``peak`` is the most ever held. ``slid``
    pages were taken over as windows moved on, and ``written_rows`` rows stored, since the start."""

    group: str
    total: int
    free: int
    held: int
    promised: int
    peak: int
    slid: int
    written_rows: int


class Ledger:
    """Page tables of all requests over one pool per group.

    Args:
        demand: groups, page size, longest request and how rings are shaped.
        pages: pages of each pool, in the order of ``demand.groups``.
    """

    def __init__(self, demand: Demand, pages: tuple[int, ...]) -> None:
        self._demand = demand
        self.groups: tuple[GroupSpec, ...] = demand.groups
        self.pools = tuple(PagePool(n) for n in pages)
        self._tables: dict[str, tuple[PageTable, ...]] = {}
        self._peaks = [0] * len(pages)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tables

    def _new_tables(self, prompt_tokens: int) -> tuple[PageTable, ...]:
        bounds = (group.span.bind(prompt_tokens) for group in self.groups)
        return tuple(
            PageTable(pool, self._demand.bound_shape(bound), bound)
            for pool, bound in zip(self.pools, bounds, strict=True)
        )

    def fits_ever(self, prompt_tokens: int, max_tokens: int) -> str | None:
        """None, or the reason why a request of ``max_tokens`` tokens in all could not even run alone."""
        for table, pool, group in zip(self._new_tables(prompt_tokens), self.pools, self.groups, strict=True):
            need = table.shape.pages(max_tokens)
            if need > pool.num_pages:
                return f"it needs {need} pages of the {group.name} pool, which has {pool.num_pages}"
        return None

    def admit(self, request_id: str, prompt_tokens: int, known_tokens: int, max_tokens: int) -> bool:
        """Open tables and promise their pages: a window's whole table (at most what ``max_tokens``
        tokens need), a full group's pages for the ``known_tokens``. False, and no change, when a pool is short.
        """
        tables = self._new_tables(prompt_tokens)
        needs = self._needs(tables, known_tokens, max_tokens)
        if not self._available(needs):
            return False
        for table, pool, need in zip(tables, self.pools, needs, strict=True):
            pool.promise(need)
            table.promise = need
        self._tables[request_id] = tables
        return True

    def has_room(self, prompt_tokens: int, known_tokens: int, max_tokens: int) -> bool:
        """Whether ``admit`` would find the pages."""
        return self._available(self._needs(self._new_tables(prompt_tokens), known_tokens, max_tokens))

    def _available(self, needs: list[int]) -> bool:
        return all(n <= pool.available for n, pool in zip(needs, self.pools, strict=True))

    @staticmethod
    def _needs(tables: tuple[PageTable, ...], known_tokens: int, max_tokens: int) -> list[int]:
        """Pages that admission promises, per group."""
        return [t.shape.pages(max_tokens if t.bound.span.bounded else known_tokens) for t in tables]

    def reserve(self, request_id: str, start: int, count: int, leave: int = 0) -> tuple[TableStep, ...] | None:
        """Pages for rows start … start + count - 1 in every group; None, and no change, when a pool is short or
        would keep fewer than ``leave`` available pages. ``start`` may lie up to the slack before the end of
        the rows reserved last: those after it are given up."""
        tables = self._tables[request_id]
        for table, pool in zip(tables, self.pools, strict=True):
            unpromised = table.fresh_pages(start, count) - table.promise
            if unpromised > 0 and unpromised > pool.available - leave:
                return None
        steps = tuple(table.reserve(start, count) for table in tables)
        self._note_peaks()
        return steps

    def _note_peaks(self) -> None:
        for i, pool in enumerate(self.pools):
            self._peaks[i] = max(self._peaks[i], pool.num_pages - pool.num_free)

    def repeatable(self, request_id: str, start: int) -> bool:
        """Whether a reserved step from ``start`` can be run again, see ``PageTable.repeatable``."""
        return all(table.repeatable(start) for table in self._tables[request_id])

    def fork(
        self, parent: str, child: str, length: int, max_tokens: int
    ) -> tuple[tuple[tuple[int, int], ...], ...] | None:
        """Tables of ``child`` over the first ``length`` rows of ``parent``, admitted like a request.

        Returns per group the page copies (source, target) to make once those rows are written;
        None, and no change, when a pool is short.
        """
        tables = self._tables[parent]
        wanted = []
        for table, pool in zip(tables, self.pools, strict=True):
            now = table.fork_pages(length)
            later = table.shape.pages(max_tokens) - table.num_pages if table.bound.span.bounded else 0
            if now + max(later, 0) > pool.available:
                return None
            wanted.append(max(later, 0))
        copies: list[tuple[tuple[int, int], ...]] = []
        twins = []
        for table, pool, later in zip(tables, self.pools, wanted, strict=True):
            group_copies: list[tuple[int, int]] = []
            twin = table.fork(length, group_copies)
            pool.promise(later)
            twin.promise = later
            twins.append(twin)
            copies.append(tuple(group_copies))
        self._tables[child] = tuple(twins)
        self._note_peaks()
        return tuple(copies)

    def release(self, request_id: str) -> None:
        """Close a request's tables; every page of theirs loses a reference."""
        for table in self._tables.pop(request_id):
            table.release()

    def request_pages(self, request_id: str) -> dict[str, int]:
        """Pages that a request references, by group name."""
        return {g.name: t.num_pages for g, t in zip(self.groups, self._tables[request_id], strict=True)}

    def private_pages(self, request_id: str) -> dict[str, int]:
        """Pages that only this request references, by group name."""
        return {g.name: t.num_private for g, t in zip(self.groups, self._tables[request_id], strict=True)}

    @property
    def requests(self) -> tuple[str, ...]:
        """Requests that have tables."""
        return tuple(self._tables)

    def page_map(self, index: int) -> list[Run]:
        """The pool of one group from its first page to its last, see ``page_runs``."""
        tables = ((request_id, tables[index]) for request_id, tables in self._tables.items())
        return page_runs(tables, self.pools[index].num_pages)

    def stats(self) -> tuple[PoolStats, ...]:
        """Each pool now."""
        return tuple(
            PoolStats(
                group=g.name,
                total=p.num_pages,
                free=p.num_free,
                held=p.num_pages - p.num_free,
                promised=p.promised,
                peak=peak,
                slid=p.slid_pages,
                written_rows=p.written_rows,
            )
            for g, p, peak in zip(self.groups, self.pools, self._peaks, strict=True)
        )

    def check(self) -> None:
        """Books of everything: pools and tables by themselves, and references and promises between them.

        Raises:
            LedgerError: what doesn't balance.
        """
        for i, pool in enumerate(self.pools):
            pool.check()
            counted: Counter[int] = Counter()
            for tables in self._tables.values():
                tables[i].check()
                counted.update(p for p in tables[i].columns if p != EMPTY)
            if any(pool.refs[p] != counted[p] for p in range(pool.num_pages)):
                raise LedgerError(f"the {self.groups[i].name} pool counts references that no table has, or misses some")
            promised = sum(tables[i].promise for tables in self._tables.values())
            if promised != pool.promised:
                raise LedgerError(
                    f"{pool.promised} pages promised in the {self.groups[i].name} pool, {promised} claimed"
                )
