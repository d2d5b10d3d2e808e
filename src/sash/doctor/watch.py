"""Watch: stands between an engine's core and its runner, and notes what each step does to the memory of the pools.

It believes no book: which slot holds which row is told by the slots whose contents change. The page tables are asked
only for the places of rows that were stored by chunks, where several slots change at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from sash.doctor.rule import needed
from sash.engine.core import EngineCore
from sash.engine.runner import Runner, StepResult
from sash.engine.sequence import Sequence
from sash.kv.ledger.table import TableStep
from sash.kv.storage import KVPool
from sash.scheduler.plan import StepItem, StepPlan

# A stored row: of which request, at which position.
Row = tuple[str, int]


@dataclass(frozen=True, slots=True)
class StepNote:
    """One step: rows computed, and per group the pages that its requests hold after it and the bytes of the pool."""

    items: tuple[tuple[str, int, int], ...]
    held: tuple[int, ...]
    pool_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loss:
    """A row that was overwritten, or not stored, although a later query of its request sees it. ``at`` is the
    position of the query, ``by`` the row that took its place (None: nobody's)."""

    group: str
    row: Row
    at: int
    by: Row | None


@dataclass(slots=True)
class Memory:
    """What one group's pool holds, as seen: ``seen`` copies the keys of its first layer [H, slots, D], ``owner`` tells
    whose row a slot holds."""

    pool: KVPool
    seen: torch.Tensor
    owner: dict[int, Row] = field(default_factory=dict)

    def slot_of(self, request: str) -> dict[int, int]:
        """Position to slot of a request's rows that are still there; of two the newer."""
        return {row[1]: slot for slot, row in self.owner.items() if row[0] == request}


# Called after a step has run: watch, plan, sequences, the step's result.
Probe = Callable[["Watch", StepPlan, dict[str, Sequence], StepResult], None]


class Watch:
    """A runner around the core's own; ``close`` takes it away again.

    Args:
        core: nobody else may use it meanwhile. Its pools are cleared.
        probe: called after every step.
    """

    def __init__(self, core: EngineCore, probe: Probe | None = None) -> None:
        assert isinstance(core.runner, Runner)
        self.core, self.inner, self.device = core, core.runner, core.runner.device
        self.groups = core.config.groups
        for pool in self.inner.pools:
            for plane in pool.planes:
                plane.zero_()
        self.memories = [Memory(pool, pool.layers[0].k.clone()) for pool in self.inner.pools]
        self.notes: list[StepNote] = []
        self.losses: list[Loss] = []
        self.moved: list[tuple[str, int, int, int]] = []  # group, position, slots changed, rows of the step
        self._addresses = self._where()
        self.replaced = 0  # steps after which a pool's memory lay elsewhere
        self._prompts: dict[str, int] = {}
        self._probe = probe
        core.runner = self

    def close(self) -> None:
        """Give the core its own runner back."""
        self.core.runner = self.inner

    def run(self, plan: StepPlan, sequences: dict[str, Sequence]) -> StepResult:
        """Run the step and look at the memory."""
        self._prompts |= {item.request_id: sequences[item.request_id].prompt_tokens for item in plan.items}
        for group, memory in enumerate(self.memories):
            self._clear(plan, group, memory)
        result = self.inner.run(plan, sequences)
        for group, memory in enumerate(self.memories):
            self._look(plan, group, memory)
        self._note(plan)
        if self._probe is not None:
            self._probe(self, plan, sequences, result)
        return result

    @staticmethod
    def _clear(plan: StepPlan, group: int, memory: Memory) -> None:
        """Empty the places that single rows will take, so that a row like the one before is seen to be stored. A single
        row is stored before anything attends, so nobody misses what was there; a chunk's places may still be read."""
        if all(item.count == 1 for item in plan.items):
            for item in plan.items:
                for slot in places(item.tables[group], item).values():
                    memory.pool.layers[0].k[:, slot] = 0
                    memory.seen[:, slot] = 0

    def _where(self) -> list[int]:
        return [plane.data_ptr() for pool in self.inner.pools for plane in (pool.k, pool.v)]

    def _note(self, plan: StepPlan) -> None:
        now = self._where()
        self.replaced += now != self._addresses
        self._addresses = now
        stats = self.core.ledger.stats()
        self.notes.append(
            StepNote(
                tuple((item.request_id, item.start, item.count) for item in plan.items),
                tuple(pool.held for pool in stats),
                tuple(memory.pool.num_bytes for memory in self.memories),
            )
        )

    def _look(self, plan: StepPlan, group: int, memory: Memory) -> None:
        """Who wrote where, and whose row is gone."""
        now = memory.pool.layers[0].k
        changed = (now != memory.seen).any(-1).any(0).nonzero().flatten().tolist()
        claims: dict[int, Row] = {}
        for item in plan.items:
            for position, slot in places(item.tables[group], item).items():
                claims.setdefault(slot, (item.request_id, position))
        strays = [slot for slot in changed if slot not in claims]
        rows = sum(item.count for item in plan.items)
        if len(changed) > rows or (strays and self._are_copies(strays, now, memory.seen)):
            self.moved.append((self.groups[group].name, plan.items[0].start, len(changed), rows))
        for slot in changed:
            self._overwrite(plan, group, slot, claims.get(slot), memory)
        self._note_unwritten(plan, group, set(changed), memory)
        memory.seen[:, changed] = now[:, changed]

    @staticmethod
    def _are_copies(strays: list[int], now: torch.Tensor, before: torch.Tensor) -> bool:
        """Whether rows that turned up in strange places lay elsewhere before."""
        return any(bool((before == now[:, slot : slot + 1]).all(-1).all(0).any()) for slot in strays)

    def _overwrite(self, plan: StepPlan, group: int, slot: int, by: Row | None, memory: Memory) -> None:
        old = memory.owner.get(slot)
        if old is not None and old != by and self._still_needed(plan, group, old):
            self.losses.append(Loss(self.groups[group].name, old, self._next_query(plan, old[0]), by))
        if by is not None:
            memory.owner[slot] = by
        else:
            memory.owner.pop(slot, None)

    def _note_unwritten(self, plan: StepPlan, group: int, changed: set[int], memory: Memory) -> None:
        """Rows of the step that a later query sees and that stand nowhere."""
        for item in plan.items:
            where = places(item.tables[group], item)
            for position in range(item.start, item.end):
                row = (item.request_id, position)
                # The row's own query sees it in hand.
                if not needed(self.groups[group].span, self._prompts[item.request_id], item.end, position):
                    continue
                slot = where.get(position)
                if slot is None or (slot not in changed and memory.owner.get(slot) != row):
                    self.losses.append(Loss(self.groups[group].name, row, item.end, None))
                elif memory.owner.get(slot) != row:
                    by = memory.owner.get(slot)
                    self.losses.append(Loss(self.groups[group].name, row, item.end, by))

    def _next_query(self, plan: StepPlan, request: str) -> int:
        """The first query that attends after this step's writes: a single row attends after its own."""
        for item in plan.items:
            if item.request_id == request:
                return item.start if item.count == 1 else item.end
        ticket = self.core.scheduler.find(request)
        return ticket.scheduled if ticket else 0

    def _still_needed(self, plan: StepPlan, group: int, row: Row) -> bool:
        if row[0] not in self.core.ledger:
            return False
        span = self.groups[group].span
        return needed(span, self._prompts.get(row[0], 0), self._next_query(plan, row[0]), row[1])


def places(table: TableStep, item: StepItem) -> dict[int, int]:
    """Position to slot of the item's rows that its table stores."""
    size, columns = table.shape.page_size, table.write
    kept = [p for part in table.kept(item.start, item.end) for p in part]
    where = ((p, table.shape.column(p // size)) for p in kept)
    return {p: columns[column] * size + p % size for p, column in where if column < len(columns)}
