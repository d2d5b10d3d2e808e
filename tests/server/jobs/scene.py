"""A store, a runner, and requests that end when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sash.server.jobs.records import Job, NewJob, NewRequest, Pending
from sash.server.jobs.runner import JobRunner
from sash.server.jobs.store import JobStore
from sash.server.jobs.thread import StoreThread


class Scene:
    """A store, a runner, and requests that end when the test says so."""

    def __init__(self, folder: Path, seats: int = 100, retention_s: float = 1000.0, **store: Any) -> None:
        self.thread = StoreThread(lambda: JobStore(folder, **store))
        self.seats = seats
        self.retention_s = retention_s
        self.order: list[tuple[str, int]] = []
        self.running: dict[tuple[str, int], asyncio.Future[tuple[int, bytes]]] = {}
        self.by_itself: Callable[[Pending], Awaitable[tuple[int, bytes]]] | None = None

    async def execute(self, pending: Pending) -> tuple[int, bytes]:
        key = (pending.job_id, pending.index)
        self.order.append(key)
        assert key not in self.running, "it runs twice at a time"
        self.running[key] = asyncio.get_running_loop().create_future()
        try:
            if self.by_itself is not None:
                return await self.by_itself(pending)
            return await self.running[key]
        finally:
            del self.running[key]

    def fits(self, answers: int, running: int) -> bool:
        return running + answers <= self.seats

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Scene]:
        await self.thread.start()
        self.runner = JobRunner(self.thread, self.execute, self.fits, models=("m",), retention_s=self.retention_s)
        task = asyncio.create_task(self.runner.run())
        try:
            yield self
        finally:
            self.runner.close()
            await asyncio.wait_for(task, 20)
            await self.thread.close()

    async def add(self, count: int = 3, **fields: Any) -> str:
        answers = fields.pop("answers", 1)
        requests = [NewRequest("/v1/completions", b"%d" % i, answers=answers) for i in range(count)]
        job, _ = await self.thread.call(JobStore.create, NewJob(requests, **fields))
        self.runner.add(job)
        return job.id

    async def job(self, job_id: str) -> Job:
        job = await self.thread.call(JobStore.get, job_id)
        assert job is not None
        return job

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not true():
                await asyncio.sleep(0.001)

    async def state(self, job_id: str, state: str) -> Job:
        async with asyncio.timeout(20):
            while (job := await self.job(job_id)).state != state:
                await asyncio.sleep(0.001)
        return job

    async def bodies(self, job_id: str) -> dict[int, tuple[int | None, bytes | None]]:
        _, results = await self.thread.call(JobStore.results, job_id)
        return {result.index: (result.status, result.body) for result in results}


async def echo(pending: Pending) -> tuple[int, bytes]:
    await asyncio.sleep(0)
    return 200, b'"%b"' % pending.body


def play(folder: Path, test: Callable[[Scene], Awaitable[None]], **options: Any) -> None:
    async def whole() -> None:
        async with Scene(folder, **options).open() as scene:
            await test(scene)

    asyncio.run(whole())
