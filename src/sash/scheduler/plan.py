"""StepPlan: what one step computes, in integers. Made by the scheduler, carried out by the runner."""

from __future__ import annotations

from dataclasses import dataclass

from sash.kv.ledger.table import TableStep


@dataclass(frozen=True, slots=True)
class StepItem:
    """One request's part of a step.

    Rows ``start`` … ``start + count - 1`` are computed. ``samples`` says that the last row is the
    request's newest token, so a token follows it; ``forks`` names further requests that draw their
    own token from that row. ``tables`` has one entry per KV group. The last ``num_drafts`` rows are
    guessed tokens after the newest one: a token follows it and each guess that turns out right.

    ``first_rows`` gives, per layer, the position of the first row whose output is still computed
    from that layer on (K and V are computed for every row that enters the layer); None: all rows.
    ``writes`` says per layer whether K and V are written; None: all are. With both, rebuilding a
    window is an ordinary chunk.
    """

    request_id: str
    start: int
    count: int
    samples: bool
    tables: tuple[TableStep, ...]
    forks: tuple[str, ...] = ()
    first_rows: tuple[int, ...] | None = None
    writes: tuple[bool, ...] | None = None
    num_drafts: int = 0

    @property
    def newest(self) -> int:
        """Position of the last row whose token is known; the request's newest where the item samples."""
        return self.end - 1 - self.num_drafts

    @property
    def end(self) -> int:
        """One past the last position computed."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. ``copies_after`` holds, per KV group, page copies (source, target) to make after the
    last layer has written."""

    items: tuple[StepItem, ...]
    copies_after: tuple[tuple[tuple[int, int], ...], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows that the linear layers see."""
        return sum(item.count for item in self.items)
