"""What a decoding step copies: bytes read out of the pools by torch, rows that move, memory that is allocated anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sash.doctor.finding import Finding, Status, ok, skipped
from sash.doctor.watch import Watch
from sash.engine.runner import StepResult
from sash.engine.sequence import Sequence as Answering
from sash.kv.storage import KVPool
from sash.scheduler.plan import StepPlan
from sash.spec.groups import GroupSpec

NAME = "no-copies"


@dataclass(frozen=True, slots=True)
class Copied:
    """One step at ``position``: bytes that came out of the pools, those of the rows that its request holds there, and
    those that crossed between devices. ``gathers``: this engine's attention gathers its rows by torch."""

    position: int
    out_bytes: int
    held_bytes: int
    device_bytes: int
    gathers: bool


class _Counter(TorchDispatchMode):
    """Counts what torch reads from some storages into other memory, and what it sends between devices."""

    def __init__(self, pools: tuple[KVPool, ...]) -> None:
        super().__init__()
        self._pools = {plane.untyped_storage().data_ptr() for pool in pools for plane in pool.planes}
        self.out_bytes = self.device_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.endswith("_like") or func.overloadpacket.__name__.startswith("new_"):
            return out  # takes a shape, reads nothing
        before = list(_tensors((args, kwargs or {})))
        for made in _tensors(out):
            if any(t.device != made.device for t in before):
                self.device_bytes += made.numel() * made.element_size()
            if _place(made) in self._pools:
                continue
            if any(_place(t) in self._pools for t in before):
                self.out_bytes += made.numel() * made.element_size()
        return out


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


class Copies:
    """A probe (``sash.doctor.watch.Probe``) that repeats the single row at ``position`` and counts what is copied."""

    def __init__(self, position: int) -> None:
        self._position = position
        self.found: Copied | None = None

    def __call__(self, watch: Watch, plan: StepPlan, sequences: dict[str, Answering], _result: StepResult) -> None:
        """Look, if this is the step."""
        item = plan.items[0]
        if len(plan.items) > 1 or item.start != self._position or self.found is not None:
            return
        held = 0
        for pool, pages in zip(watch.inner.pools, watch.notes[-1].held, strict=True):
            held += pages * pool.page_size * pool.num_bytes // pool.k.shape[2]
        counter = _Counter(watch.inner.pools)
        with counter:
            watch.inner.run(plan, sequences)
        self.found = Copied(item.start, counter.out_bytes, held, counter.device_bytes, bool(watch.inner.op_by_op))


def copy_finding(copied: Copied | None, watch: Watch, groups: tuple[GroupSpec, ...]) -> Finding:
    """Whether a step copies more than the rows that it adds."""
    if watch.moved:
        group, position, changed, rows = watch.moved[-1]
        return Finding(
            NAME,
            Status.FAIL,
            f"the step at position {position} changed {changed} slots of the {group} pool and computed {rows} rows",
            "stored rows are moved as the window slides: a shifting buffer copies the whole window in each step",
            "write each row over the oldest one (a ring, sash.kv.ledger.table.PageTable) and move nothing",
        )
    if watch.replaced:
        return Finding(
            NAME,
            Status.FAIL,
            f"a pool's memory lay elsewhere after {watch.replaced} of {len(watch.notes)} steps",
            "a step allocates the pool anew and copies it there",
            "allocate pools once (sash.kv.storage.KVPool) and write rows in place",
        )
    if copied is None:
        return skipped(NAME, "no step of a single row came by")
    names = " and ".join(g.name for g in groups)
    seen = (
        f"the step at position {copied.position} copied {_kib(copied.out_bytes)} out of the {names} pools, where its "
        f"request holds {_kib(copied.held_bytes)}; {_kib(copied.device_bytes)} between devices"
    )
    allowed = copied.held_bytes if copied.gathers else 0
    if copied.out_bytes > allowed:
        return Finding(
            NAME,
            Status.FAIL,
            seen,
            "each step copies cached rows before it attends: the time per token grows with what is stored",
            "let attention read the pool in place through slots, without clone, cat or index_select of whole planes",
        )
    note = ": its torch kernels gather the rows that they attend to" if copied.out_bytes else ""
    return ok(NAME, seen + note)


def _kib(count: int) -> str:
    return f"{count / 1024:.0f} KiB"
