"""How many pages each pool gets: computed from bytes, context and concurrency, not guessed."""

from __future__ import annotations

from dataclasses import dataclass

from sash.spec.errors import ConfigError
from sash.spec.footprint import TableShape, page_bytes, table_shape
from sash.spec.groups import GroupSpec
from sash.spec.span import BoundSpan


@dataclass(frozen=True, slots=True)
class Demand:
    """What the pools are sized for. ``dtypes`` are those that each group's K and V are stored as; ``slack``
    rows stay below every window, so that a request can step back by as many."""

    groups: tuple[GroupSpec, ...]
    dtypes: tuple[str, ...]
    page_size: int
    max_model_len: int
    max_num_seqs: int
    hybrid_ratio: float = 1.0
    slack: int = 0

    def shape(self, group: GroupSpec) -> TableShape:
        """The longest request's table; a reference window is sized for a prompt that fills the context."""
        return self.bound_shape(group.span.bind(self.max_model_len))

    def bound_shape(self, bound: BoundSpan) -> TableShape:
        """The table of a request with this span."""
        return table_shape(bound, self.page_size, self.max_model_len, slack=self.slack, hybrid_ratio=self.hybrid_ratio)

    def request_pages(self) -> tuple[int, ...]:
        """Pages that one request of ``max_model_len`` holds at most, per group."""
        return tuple(self.shape(g).pages(self.max_model_len) for g in self.groups)

    def page_bytes(self) -> tuple[int, ...]:
        """Bytes of one page, per group."""
        return tuple(page_bytes(g, self.page_size, d) for g, d in zip(self.groups, self.dtypes, strict=True))

    def request_bytes(self) -> int:
        """Bytes that one request of ``max_model_len`` holds at most."""
        return sum(p * b for p, b in zip(self.request_pages(), self.page_bytes(), strict=True))


def auto_split(demand: Demand, budget: int) -> tuple[int, ...]:
    """Pages per pool for a byte budget.

    Windows of every request that may run at once come first (at most half of the budget when not
    all can run at full length); the rest is full pages. Nothing gets more than max_num_seqs
    requests of max_model_len could use.
    """
    per_request, page = demand.request_pages(), demand.page_bytes()
    whole = min(budget // max(demand.request_bytes(), 1), demand.max_num_seqs)
    if whole == demand.max_num_seqs:
        return tuple(whole * p for p in per_request)
    if demand.hybrid_ratio < 1 or len({g.bounded for g in demand.groups}) == 1:
        share = budget / demand.request_bytes()
        return tuple(int(share * p) for p in per_request)
    ring_bytes = sum(n * b for g, n, b in zip(demand.groups, per_request, page, strict=True) if g.bounded)
    full_row = sum(b for g, b in zip(demand.groups, page, strict=True) if not g.bounded)
    one_full = demand.request_bytes() - ring_bytes
    windows = min(demand.max_num_seqs, max(whole, 1, min(budget // 2, budget - one_full) // max(ring_bytes, 1)))
    full_pages = max(budget - windows * ring_bytes, 0) // full_row
    return tuple(windows * n if g.bounded else full_pages for g, n in zip(demand.groups, per_request, strict=True))


def ratio_split(demand: Demand, budget: int, ratio: float, max_total_tokens: int | None) -> tuple[int, ...]:
    """SGLang's rule: window tokens = ratio · full tokens, both floored to pages.

    full tokens = budget / (bytes per full row + ratio · bytes per window row), or
    ``max_total_tokens`` when that is given.
    """
    size = demand.page_size
    full_row = sum(b for g, b in zip(demand.groups, demand.page_bytes(), strict=True) if not g.bounded) / size
    window_row = sum(b for g, b in zip(demand.groups, demand.page_bytes(), strict=True) if g.bounded) / size
    full_tokens = max_total_tokens if max_total_tokens is not None else int(budget / (full_row + ratio * window_row))
    full_pages = full_tokens // size
    window_pages = int(full_pages * size * ratio) // size
    return tuple(window_pages if g.bounded else full_pages for g in demand.groups)


def total_tokens_split(demand: Demand, max_total_tokens: int) -> tuple[int, ...]:
    """``max_total_tokens`` alone: that many full tokens (window tokens where there is no full group);
    windows as the automatic split has them. A table of full length (hybrid ratio 0) follows the full one."""
    pages = max_total_tokens // demand.page_size
    if len({g.bounded for g in demand.groups}) == 1 or demand.hybrid_ratio == 0:
        return (pages,) * len(demand.groups)
    rings = demand.request_pages()
    return tuple(
        min(demand.max_num_seqs * n, max(pages, n)) if g.bounded else pages
        for g, n in zip(demand.groups, rings, strict=True)
    )


def check_split(demand: Demand, pages: tuple[int, ...], options: str) -> None:
    """Refuse pools in which one request of max_model_len could never be admitted.

    Raises:
        ConfigError: naming the pool, its tokens, what one request needs and the ways out.
    """
    for group, have, need in zip(demand.groups, pages, demand.request_pages(), strict=True):
        if have < need:
            raise ConfigError(
                f"the {group.name} pool has {have * demand.page_size} tokens ({have} pages) but one request of "
                f"max_model_len={demand.max_model_len} needs {need * demand.page_size} ({need} pages): {options}"
            )
