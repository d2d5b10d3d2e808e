"""Pages that hold names of rows instead of K and V, to see whether tables lead where they should.

A row's name is (who computed it, position): answers of one prompt share the names of the prompt's rows. Executing a
step reads, copies and writes as a runner does; every row that a query may see must be found under its name.
"""

from __future__ import annotations

from sash.kv.ledger.ledger import Ledger
from sash.kv.ledger.table import EMPTY, PageTable, TableStep
from sash.spec.groups import GroupSpec
from sash.spec.sizing import Demand
from sash.spec.span import Span, SpanKind

Name = tuple[str, int]
SPANS = {
    "full": Span.full(),
    "window": Span.sliding(7),
    "narrow": Span.sliding(1),
    "wide": Span.sliding(40),
    "sinks": Span.sliding(6, sinks=5),
    "chunk": Span.chunked(8),
    "odd chunk": Span.chunked(7),
    "reference": Span(SpanKind.REFERENCE, 5),
    "prefill": Span(SpanKind.PREFILL_WINDOW, 5),
}
Copies = tuple[tuple[tuple[int, int], ...], ...]


def demand(
    names: list[str], *, page_size: int, max_model_len: int, ratio: float = 1.0, seqs: int = 4, slack: int = 0
) -> Demand:
    """Groups of one layer each, by the names of their spans."""
    groups = tuple(GroupSpec(name, SPANS[name], (i,), 1, 1, 1) for i, name in enumerate(names))
    return Demand(groups, 4, page_size, max_model_len, seqs, ratio, slack)


class NaivePages:
    """The content of every pool of a ledger: page and offset to a row's name."""

    def __init__(self, ledger: Ledger, page_size: int) -> None:
        self._ledger, self._size = ledger, page_size
        self._content: list[dict[tuple[int, int], Name]] = [{} for _ in ledger.pools]

    def forget_free_pages(self) -> None:
        """What is free may hold anything: here it holds nothing."""
        for pool, content in zip(self._ledger.pools, self._content, strict=True):
            for key in [key for key in content if not pool.refs[key[0]]]:
                del content[key]

    def name(self, request_id: str, position: int, prompt: int) -> Name:
        """Whose row it is: the prompt's belong to the family (``a#1`` is of the family ``a``)."""
        return (request_id.split("#")[0] if position < prompt else request_id, position)

    def run(
        self, request_id: str, tables: tuple[TableStep, ...], start: int, end: int, accepted: int | None = None
    ) -> None:
        """One request's part of a step: copies, then reads by every query, then writes; rows from ``accepted`` on
        are wrong drafts', and nobody's."""
        for group, step in enumerate(tables):
            self._copy(group, step.copies)
            prompt = step.bound.prompt_tokens
            seen = {k for q in range(start, end) for k in range(start) if step.bound.visible(q, k)}
            for k in seen:
                self._assert_found(group, step.read, step, request_id, k, prompt)
            for p in range(start, end):
                if step.keeps(p):
                    page = step.write[step.shape.column(p // self._size)]
                    assert page != EMPTY, f"{request_id}: row {p} has no page in group {group}"
                    wrong = accepted is not None and p >= accepted
                    name = ("wrong", p) if wrong else self.name(request_id, p, prompt)
                    self._content[group][page, p % self._size] = name

    def assert_not_shared(self, tables: tuple[TableStep, ...], start: int, end: int, forks: int = 0) -> None:
        """Nothing that a reserved step will write is anybody else's, its own new ``forks`` apart."""
        for pool, step in zip(self._ledger.pools, tables, strict=True):
            for p in range(start, end):
                if step.keeps(p):
                    page = step.write[step.shape.column(p // self._size)]
                    assert 1 <= pool.refs[page] <= 1 + forks, "a shared page is written"

    def _copy(self, group: int, pairs: tuple[tuple[int, int], ...]) -> None:
        content = self._content[group]
        for source, target in pairs:
            for offset in range(self._size):
                content.pop((target, offset), None)
                if (source, offset) in content:
                    content[target, offset] = content[source, offset]

    def copy(self, copies: Copies) -> None:
        """Copies after a step, per group."""
        for group, pairs in enumerate(copies):
            self._copy(group, pairs)

    def _assert_found(
        self, group: int, columns: object, table: TableStep | PageTable, request_id: str, k: int, prompt: int
    ) -> None:
        column = table.shape.column(k // self._size)
        assert column < len(columns), f"{request_id}: row {k} has no column in group {group}"  # type: ignore[arg-type]
        page = columns[column]  # type: ignore[index]
        found = self._content[group].get((page, k % self._size))
        wanted = self.name(request_id, k, prompt)
        assert found == wanted, f"{request_id}: row {k} of group {group} holds {found}"

    def assert_retained(self, request_id: str, computed: int) -> None:
        """Every row that a later query may see is where the table says, and pages stay within pin + ring."""
        for group, table in enumerate(self._ledger._tables[request_id]):
            bound = table.bound
            for q in range(computed, computed + 2 * max(bound.span.window, 1) + 2):
                for k in range(min(computed, 200)):
                    if bound.visible(q, k):
                        self._assert_found(group, table.columns, table, request_id, k, bound.prompt_tokens)
            if bound.span.bounded:
                assert table.num_private <= table.shape.pin + table.shape.ring

    def survivors(self, request_id: str, group: int) -> set[int]:
        """Positions of a request whose rows its pages still hold."""
        table = self._ledger._tables[request_id][group]
        mine = (request_id, request_id.split("#")[0])
        pages = {page for page in table.columns if page != EMPTY}
        return {name[1] for (page, _), name in self._content[group].items() if page in pages and name[0] in mine}
