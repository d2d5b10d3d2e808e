"""Whether each row that a later query sees is still where it was written; and whose rows took its place."""

from __future__ import annotations

from collections.abc import Sequence

from sash.doctor.finding import Finding, Status, ok
from sash.doctor.watch import Loss, Watch
from sash.spec.groups import GroupSpec

SURVIVE, ISOLATED = "rows-survive", "batch-isolated"


def own_losses(watches: Sequence[Watch]) -> list[Loss]:
    """Rows lost to their own request, or never stored."""
    return [loss for watch in watches for loss in watch.losses if loss.by is None or loss.by[0] == loss.row[0]]


def foreign_losses(together: Watch, apart: Sequence[Watch]) -> list[Loss]:
    """Rows lost to another request; and all that requests lose side by side where none is lost alone."""
    if not any(watch.losses for watch in apart):
        return together.losses
    return [loss for loss in together.losses if loss.by is not None and loss.by[0] != loss.row[0]]


def only_edge(losses: Sequence[Loss], groups: Sequence[GroupSpec]) -> bool:
    """Whether all rows lost are the farthest that their query sees: a window one row short loses no others."""
    windows = {g.name: g.span.window for g in groups}
    return all(loss.at - loss.row[1] == windows[loss.group] - 1 for loss in losses)


def rows_finding(losses: Sequence[Loss], watches: Sequence[Watch]) -> Finding:
    """The first row that was lost, or how many were followed."""
    if not losses:
        rows = sum(count for watch in watches for note in watch.notes for _, _, count in note.items)
        return ok(SURVIVE, f"{rows} rows were followed: each stayed as long as a query could see it")
    loss = losses[0]
    how = "was never stored" if loss.by is None else f"was overwritten by position {loss.by[1]}"
    return Finding(
        SURVIVE,
        Status.FAIL,
        f"{loss.group} layers: position {loss.row[1]} {how}, but the query at position {loss.at} sees it; so it went "
        f"with {len(losses)} rows",
        "the ring is shorter than the window, or a chunk overwrites rows before it has attended",
        "keep ceil((W - 1) / page) + 1 pages, and write a chunk's rows after its queries have attended "
        "(sash.kv.ledger.table.TableStep)",
    )


def crossed_finding(losses: Sequence[Loss]) -> Finding:
    """Requests that run together share memory."""
    loss = losses[0]
    how = f"was overwritten by position {loss.by[1]} of another" if loss.by else "was not stored in its own place"
    return Finding(
        ISOLATED,
        Status.FAIL,
        f"{loss.group} layers, requests side by side: position {loss.row[1]} of one request {how} "
        f"while the query at position {loss.at} sees it; {len(losses)} rows in all",
        "requests of a batch share a write pointer: each needs its own length and its own table",
        "compute slots from each request's own table and position (sash.engine.step), never from the batch's",
    )
