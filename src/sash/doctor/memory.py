"""Whether the pages that a request holds stop growing at its window, and come back at its end."""

from __future__ import annotations

from collections.abc import Sequence

from sash.doctor.finding import Finding, Status, ok
from sash.doctor.rule import most_pages
from sash.doctor.watch import StepNote
from sash.kv.ledger.ledger import Ledger
from sash.spec.config import ResolvedConfig

NAME = "cache-bounded"


def memory_finding(config: ResolvedConfig, notes: Sequence[StepNote], prompt_tokens: int, ledger: Ledger) -> Finding:
    """From the steps of one request that ran alone."""
    size, demand = config.demand.page_size, config.demand
    lost = [f"{pool.held} pages of {pool.group}" for pool in ledger.stats() if pool.held or pool.promised]
    if lost:
        return Finding(
            NAME,
            Status.FAIL,
            f"after the request ended {' and '.join(lost)} are still held",
            "pages of ended requests don't come back: memory grows with every request",
            "release every page and promise of a request when it ends (sash.kv.ledger.ledger.Ledger.release)",
        )
    grown = [i for i, (a, b) in enumerate(zip(notes[0].pool_bytes, notes[-1].pool_bytes, strict=True)) if b > a]
    if grown:
        group, first, last = config.groups[grown[0]], notes[0].pool_bytes[grown[0]], notes[-1].pool_bytes[grown[0]]
        return Finding(
            NAME,
            Status.FAIL,
            f"the {group.name} pool grew from {first} to {last} bytes in {len(notes)} steps",
            "the pool's memory is made larger while it runs",
            "size pools once, at the start, and write rows over the oldest",
        )
    seen = []
    for g, group in enumerate(config.groups):
        series = [(_rows(note), note.held[g]) for note in notes]
        most = most_pages(group.span, prompt_tokens, size, demand.slack) if demand.hybrid_ratio == 1 else None
        rows, pages = series[-1]
        limit = -(-rows // size) if most is None else min(most, -(-rows // size))
        peak = max(held for _, held in series)
        if peak > limit:
            return _grows(group.name, group.span.describe(), series, limit, size)
        bound = f", of at most {most} at any length" if most is not None else ", one for each page of text"
        seen.append(f"{group.name} ({group.span.describe()}): {pages} pages of {size} after {rows} tokens{bound}")
    return ok(NAME, "; ".join(seen))


def _rows(note: StepNote) -> int:
    return max(start + count for _, start, count in note.items)


def _grows(name: str, span: str, series: Sequence[tuple[int, int]], limit: int, size: int) -> Finding:
    over = next(rows for rows, held in series if held > limit)
    (last_rows, last) = series[-1]
    return Finding(
        NAME,
        Status.FAIL,
        f"{name} layers ({span}): {last} pages of {size} after {last_rows} tokens, where {limit} are enough; too many "
        f"since token {over}",
        "pages that no later query can see are kept: the cache grows in a line with the text",
        "take over the oldest page when a new one is needed (a ring of ceil((W - 1) / page) + 1 pages), see "
        "sash.spec.footprint.table_shape",
    )
