"""A step plan in tensors: the only place where a plan's integers become tensors."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sash.engine.sequence import Sequence
from sash.kv.ledger.table import TableStep
from sash.kv.storage import Index, KVPool, key_block
from sash.ops.base import Ops
from sash.ops.packed import rotate
from sash.ops.paged import PagedBatch, Segment
from sash.scheduler.plan import StepItem, StepPlan
from sash.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one item that enter a layer (``enter`` …) and leave it (``leave`` …), as positions."""

    enter: int
    leave: int


class Step:
    """One plan in tensors: token ids, positions, row narrowing, and per group who attends to what."""

    def __init__(
        self,
        plan: StepPlan,
        sequences: Mapping[str, Sequence],
        spec: ModelSpec,
        place: Mapping[int, tuple[int, int]],
        pools: tuple[KVPool, ...],
        ops: Ops,
    ) -> None:
        self.plan = plan
        self._spec = spec
        self._place = place
        self._pools = pools
        self._ops = ops
        tokens: list[int] = []
        for item in plan.items:
            seq = sequences[item.request_id]
            tokens += seq.tokens[item.start : item.end]
            tokens += seq.draft[: item.num_drafts]
        self.token_ids = torch.tensor(tokens)
        self.positions = torch.cat([torch.arange(i.start, i.end) for i in plan.items])
        self._rows = self._plan_rows(sequences)
        self.out_first = [r.leave for r in self._rows[-1]]
        self._views: dict[tuple[Any, ...], GroupStep] = {}

    def _plan_rows(self, sequences: Mapping[str, Sequence]) -> list[tuple[Rows, ...]]:
        """Per layer and item, the rows that enter and leave. The top layer's output is needed only
        where logits are: every row of a prompt being scored, else the newest token's if it samples, and drafts'."""
        layers: list[tuple[Rows, ...]] = []
        enter = [item.start for item in self.plan.items]
        for layer in range(len(self._spec.layers)):
            leave = [
                max(a, item.start if item.first_rows is None else item.first_rows[layer])
                for a, item in zip(enter, self.plan.items, strict=True)
            ]
            if layer == len(self._spec.layers) - 1:
                leave = [
                    max(a, _needed_from(item, sequences[item.request_id]))
                    for a, item in zip(leave, self.plan.items, strict=True)
                ]
            rows = tuple(Rows(a, b) for a, b in zip(enter, leave, strict=True))
            # Layers that see the same rows share one tuple: views are found by its identity.
            layers.append(layers[-1] if layers and layers[-1] == rows else rows)
            enter = leave
        return layers

    def copies_before(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per group, pages to copy before the first layer."""
        return tuple(
            tuple(pair for item in self.plan.items for pair in item.tables[g].copies) for g in range(len(self._pools))
        )

    def narrow(self, device: torch.device) -> dict[int, torch.Tensor] | None:
        """Per layer that drops rows, the indices of those that stay."""
        out: dict[int, torch.Tensor] = {}
        for layer, rows in enumerate(self._rows):
            if any(r.leave > r.enter for r in rows):
                keep, row = [], 0
                for r, item in zip(rows, self.plan.items, strict=True):
                    keep.append(torch.arange(row + r.leave - r.enter, row + item.end - r.enter))
                    row += item.end - r.enter
                out[layer] = torch.cat(keep).to(device)
        return out or None

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink_logits: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of one layer, and the write of its K and V. Rows that attend to the pool alone
        are written first, the others once the layer has attended: their pages may hold rows that
        this step still reads."""
        group, index = self._place[layer]
        pool, spec = self._pools[group], self._spec.layers[layer]
        view = self._view(layer, group, q.device)
        block = key_block(pool.layers[index])
        if block > 1:
            q, k = rotate(q.float(), block).to(q.dtype), rotate(k.float(), block).to(k.dtype)
        rows = pool.rows(k, v, self._ops.quantise)
        if view.early is not None:
            pool.write(index, rows, *view.early)
        out, _ = self._ops.attention(
            q,
            rows,
            pool.layers[index],
            view.batch,
            scale=spec.scale,
            softcap=spec.softcap,
            sink_logits=sink_logits,
        )
        if view.late is not None:
            pool.write(index, rows, *view.late)
        return out

    def views(self) -> list[GroupStep]:
        """Each layer's view of the step."""
        return [self._view(layer, self._place[layer][0], torch.device("cpu")) for layer in range(len(self._rows))]

    def _view(self, layer: int, group: int, device: torch.device) -> GroupStep:
        """The group's step as this layer needs it; equal for all layers that see the same rows."""
        rows = self._rows[layer]
        written = tuple([i.writes is None or i.writes[layer] for i in self.plan.items])
        key = (group, id(rows), written)
        if key not in self._views:
            self._views[key] = GroupStep.build(self.plan.items, group, rows, written, device)
        return self._views[key]


def _needed_from(item: StepItem, seq: Sequence) -> int:
    """First row whose top output is used."""
    last = item.newest if item.samples else item.end
    if seq.wants_scores(item.start):
        return min(last, max(item.start, len(seq.prompt_scores or ()) - 1))
    return last


@dataclass(frozen=True, slots=True)
class GroupStep:
    """One KV group in one step: the attention batch, and the rows to write before and after it."""

    batch: PagedBatch
    early: tuple[Index, Index] | None
    late: tuple[Index, Index] | None

    @classmethod
    def build(
        cls,
        items: tuple[StepItem, ...],
        group: int,
        rows: tuple[Rows, ...],
        written: tuple[bool, ...],
        device: torch.device,
    ) -> GroupStep:
        """Segments and slots of every item."""
        segments = []
        early: list[tuple[np.ndarray, np.ndarray]] = []
        late: list[tuple[np.ndarray, np.ndarray]] = []
        q_row = kv_row = 0
        for item, r, write in zip(items, rows, written, strict=True):
            table = item.tables[group]
            single = write and item.count == 1 and r.enter == item.start and table.keeps(item.start)
            segments.append(_segment(table, item, r, q_row, kv_row, single))
            if write:
                kept = np.concatenate([np.arange(p.start, p.stop) for p in table.kept(r.enter, item.end)])
                (early if single else late).append((kept - r.enter + kv_row, _slots(table, table.write, kept)))
            q_row += item.end - r.leave
            kv_row += item.end - r.enter
        return cls(PagedBatch(tuple(segments)), _joined(early, device), _joined(late, device))


def _segment(table: TableStep, item: StepItem, rows: Rows, q_row: int, kv_row: int, single: bool) -> Segment:
    """What one item's queries attend to. ``single``: its one row is in the pool before it attends."""
    first_query, kv_start = rows.leave, item.end if single else rows.enter
    first = table.bound.first_of(first_query, item.end)
    sinks = min(table.bound.sinks, first)
    past = np.concatenate([np.arange(sinks), np.arange(first, max(kv_start, first))])
    past = past[past < kv_start] if first_query < item.end else past[:0]
    return Segment(
        bound=table.bound,
        q_row=q_row,
        q_start=first_query,
        q_count=item.end - first_query,
        kv_row=kv_row,
        kv_start=kv_start,
        kv_count=item.end - kv_start,
        past_positions=torch.from_numpy(past),
        past_slots=torch.from_numpy(_slots(table, table.write if single else table.read, past)),
    )


def _slots(table: TableStep, columns: array[int], positions: np.ndarray) -> np.ndarray:
    """Slots [n] int64 of positions [n], by the columns of a table."""
    shape = table.shape
    pages = positions // shape.page_size
    where = np.where(pages < shape.pin, pages, shape.pin + (pages - shape.pin) % shape.ring)
    ids: np.ndarray = np.frombuffer(columns, dtype=np.int32) if len(columns) else np.zeros(0, np.int32)
    slots: np.ndarray = ids[where].astype(np.int64) * shape.page_size + positions % shape.page_size
    return slots


def _joined(parts: list[tuple[np.ndarray, np.ndarray]], device: torch.device) -> tuple[Index, Index] | None:
    """Rows and their slots of all parts; None where there are none."""
    if not sum(len(rows) for rows, _ in parts):
        return None
    rows, slots = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return _index(rows, device), _index(slots, device)


def _index(values: np.ndarray, device: torch.device) -> Index:
    """Indices [n] as a slice where each follows the one before."""
    first, last = int(values[0]), int(values[-1])
    if last - first == len(values) - 1 and bool((np.diff(values) == 1).all()):
        return slice(first, last + 1)
    return torch.from_numpy(values).to(device)
