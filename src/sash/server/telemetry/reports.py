"""Reports of the engine, asked for once however many want one, and what the two processes use of the machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import psutil

from sash.engine.report import EngineReport
from sash.server.engine import ServingEngine
from sash.server.telemetry.metrics import Metrics
from sash.spec.errors import EngineDeadError

# How long anybody waits for a report before the last one must do: a step with a long prompt may take that long.
_PATIENCE_S = 1.0
# CPU use is measured over at least so long.
_USE_OVER_S = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A report and when it came, of the clock of the metrics."""

    report: EngineReport
    taken_s: float


class Reports:
    """The engine's newest report.

    Args:
        engine: to be asked.
        metrics: gets the tokens of prompts that reports count.
    """

    def __init__(self, engine: ServingEngine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._latest: Sample | None = None
        self._latest_maps: Sample | None = None
        self._asking: dict[bool, asyncio.Task[None]] = {}

    async def get(self, *, page_maps: bool = False, max_age_s: float = 0.5) -> Sample | None:
        """The engine as it was at most ``max_age_s`` ago, or as it last was if it doesn't answer within a second;
        None when it is dead or has never answered."""
        if not self._engine.alive:
            self._latest = self._latest_maps = None
            return None
        latest = self._last(page_maps)
        if latest is not None and self._metrics.clock() - latest.taken_s <= max_age_s:
            return latest
        task = self._asking.get(page_maps)
        if task is None or task.done():
            task = self._asking[page_maps] = asyncio.create_task(self._ask(page_maps))
        done, _ = await asyncio.wait({task}, timeout=_PATIENCE_S)
        for finished in done:
            finished.result()
        return self._last(page_maps)

    def _last(self, page_maps: bool) -> Sample | None:
        return self._latest_maps if page_maps else self._latest

    async def _ask(self, page_maps: bool) -> None:
        try:
            report = await self._engine.report(page_maps=page_maps)
        except EngineDeadError:
            return
        before, self._latest = self._latest, Sample(report, self._metrics.clock())
        if page_maps:
            self._latest_maps = self._latest
        if before is not None and report.prompt_tokens >= before.report.prompt_tokens:
            new = report.prompt_tokens - before.report.prompt_tokens
            self._metrics.prompts.spread(new, before.taken_s, self._latest.taken_s)
        else:  # the first one of a core
            self._metrics.prompts.spread(report.prompt_tokens, self._metrics.started_s, self._latest.taken_s)


class ProcessUse(msgspec.Struct, frozen=True):
    """One process: ``server`` or ``core``. ``cpu_ratio`` is 1 for a processor used fully; None at the first look."""

    process: str
    cpu_s: float
    cpu_ratio: float | None
    resident_bytes: int
    threads: int
    open_files: int


class DeviceUse(msgspec.Struct, frozen=True):
    """What the model runs on. ``busy_s`` and ``idle_s`` count all its processors; ``busy_ratio`` is 1 when all are
    busy, whoever uses them; None at the first look."""

    device: str
    processors: int
    busy_s: float
    idle_s: float
    busy_ratio: float | None
    memory_bytes: int
    available_bytes: int


class Machine(msgspec.Struct, frozen=True):
    """The processes and the device now."""

    processes: list[ProcessUse]
    device: DeviceUse


class Use:
    """Reads what the server and the core use.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._handles: dict[int, psutil.Process] = {}
        # By name: when CPU seconds were read and what they were, lately and before; and the ratio between the two.
        self._readings: dict[str, tuple[float, float, float | None]] = {}

    def read(self, core_pid: int | None) -> Machine:
        """The machine now. A process that has gone is left out."""
        processes = [("server", os.getpid()), *([("core", core_pid)] if core_pid is not None else [])]
        self._handles = {pid: self._handles.get(pid) or handle for _, pid in processes if (handle := _handle(pid))}
        uses = [self._process(name, self._handles[pid]) for name, pid in processes if pid in self._handles]
        return Machine([use for use in uses if use is not None], self._device())

    def _process(self, name: str, handle: psutil.Process) -> ProcessUse | None:
        try:
            with handle.oneshot():
                times = handle.cpu_times()
                used = times.user + times.system
                return ProcessUse(
                    process=name,
                    cpu_s=used,
                    cpu_ratio=self._ratio(f"{name} {handle.pid}", used),
                    resident_bytes=handle.memory_info().rss,
                    threads=handle.num_threads(),
                    open_files=handle.num_fds() if psutil.POSIX else 0,
                )
        except psutil.Error:
            return None

    def _device(self) -> DeviceUse:
        times, memory, count = psutil.cpu_times(), psutil.virtual_memory(), psutil.cpu_count() or 1
        idle = times.idle + getattr(times, "iowait", 0.0)
        busy = sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        ratio = self._ratio("device", busy)
        return DeviceUse(
            device="cpu",
            processors=count,
            busy_s=busy,
            idle_s=idle,
            busy_ratio=None if ratio is None else min(ratio / count, 1.0),
            memory_bytes=memory.total,
            available_bytes=memory.available,
        )

    def _ratio(self, name: str, used_s: float) -> float | None:
        """CPU seconds a second since the reading before; readings closer together than a second share one."""
        now = self._clock()
        before = self._readings.get(name)
        if before is None:
            self._readings[name] = (now, used_s, None)
            return None
        at_s, then_s, ratio = before
        if now - at_s >= _USE_OVER_S:
            ratio = max(used_s - then_s, 0.0) / (now - at_s)
            self._readings[name] = (now, used_s, ratio)
        return ratio


def _handle(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None
