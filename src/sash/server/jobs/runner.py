"""JobRunner: takes requests of stored jobs while there is room, runs them, stores their results."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from sash.server.errors import ApiError, error_bytes
from sash.server.jobs.records import Finished, Job, JobStoreError, Pending
from sash.server.jobs.store import JobStore
from sash.server.jobs.thread import StoreThread
from sash.spec.errors import EngineDeadError, OverloadedError
from sash.spec.log import logger

# A request during which the engine died so often gets an error for an answer.
MAX_ATTEMPTS = 3
# Seconds between two looks for room that others have left, and between two looks at the clock.
_POLL_S = 0.05
_TIDY_S = 1.0
_IDLE_TIDY_S = 60.0
_STORE_PAUSE_S = 1.0
_AFTER_DEATH_S = 1.0

# Status and body of a request's answer. Raises OverloadedError, EngineDeadError, NotReadyError.
Execute = Callable[[Pending], Awaitable[tuple[int, bytes]]]
# Whether so many answers may be started while jobs have so many that run: fits(answers, running).
Fits = Callable[[int, int], bool]


class NotReadyError(Exception):
    """The engine loads, or is started again: the request may come again after ``retry_after_s`` seconds."""

    def __init__(self, retry_after_s: float = 1.0) -> None:
        super().__init__("not ready")
        self.retry_after_s = retry_after_s


@dataclass(slots=True, eq=False)
class _Active:
    """A job under way. ``cursor`` is the last index that was taken; ``again`` are requests to be run before further
    ones are taken; ``exhausted``: there are no further ones."""

    id: str
    max_concurrency: int | None
    started: bool
    stopping: bool
    cursor: int = -1
    exhausted: bool = False
    again: deque[Pending] = field(default_factory=deque)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def suspect(self) -> bool:
        """Whether the engine died during its next request."""
        return bool(self.again) and self.again[0].attempts > 0


class JobRunner:
    """Jobs take turns, request by request. One task, ``run``, decides everything; requests run in tasks of their own.

    Args:
        store: where jobs are.
        execute: runs a request.
        fits: whether so many answers may be started now.
        models: names of what is served here; jobs that name others wait for a server that has theirs.
        retention_s: seconds that jobs are kept after their end.
    """

    def __init__(
        self,
        store: StoreThread,
        execute: Execute,
        fits: Fits,
        *,
        models: Sequence[str],
        retention_s: float,
    ) -> None:
        self._store = store
        self._execute = execute
        self._fits = fits
        self._models = frozenset(models)
        self._retention_s = retention_s
        self._active: deque[_Active] = deque()
        self._unsaved: list[Finished] = []
        self._died: list[tuple[_Active, Pending]] = []
        self._alone = False
        self._answers = 0
        self._wake = asyncio.Event()
        self._ending = False
        self._paused_until_s = 0.0
        self._tidy_at_s = 0.0

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return sum(len(job.tasks) for job in self._active)

    def serves(self, job: Job) -> bool:
        """Whether all models that a job names are served here."""
        return self._models.issuperset(job.models)

    def add(self, job: Job) -> None:
        """A job was stored, or was there at the start; maybe both."""
        if any(active.id == job.id for active in self._active):
            return
        if not self.serves(job) and job.state != "cancelling":
            logger().warning("job_waits_for_model", job=job.id, models=list(job.models))
            return
        self._active.append(_Active(job.id, job.max_concurrency, job.started_at is not None, job.state == "cancelling"))
        self._wake.set()

    def stop_job(self, job_id: str) -> bool:
        """A job is to be stopped; False when nothing of it can run here."""
        found = [job for job in self._active if job.id == job_id]
        for job in found:
            job.stopping = True
        self._wake.set()
        return bool(found)

    async def run(self) -> None:
        """Work until ``close``."""
        for job in await self._store.call(JobStore.open_jobs):
            self.add(job)
        while not self._ending:
            self._wake.clear()
            try:
                await self._turn()
            except Exception as error:  # whatever it is: jobs go on
                logger().error("jobs_turn_failed", error=str(error), exc_info=not isinstance(error, JobStoreError))
                await asyncio.sleep(_STORE_PAUSE_S)
                continue
            await self._sleep()
        tasks = [task for active in self._active for task in active.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._save()

    def close(self) -> None:
        """Let ``run`` end: what runs is cancelled and is run again after the next start, what has ended is stored."""
        self._ending = True
        self._wake.set()

    async def _sleep(self) -> None:
        timeout_s = _POLL_S if any(map(self._ready, self._active)) else max(self._tidy_at_s - time.monotonic(), 0)
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _turn(self) -> None:
        await self._save()
        await self._blame()
        await self._tidy()
        await self._stop()
        await self._fill()

    async def _save(self) -> None:
        """Store what has ended since the last turn, in one transaction; jobs whose results can't be stored fail."""
        results, self._unsaved = self._unsaved, []
        if not results:
            return
        try:
            await self._store.call(JobStore.finish, results)
        except JobStoreError:
            for result in results:
                await self._save_alone(result)

    async def _save_alone(self, result: Finished) -> None:
        try:
            await self._store.call(JobStore.finish, [result])
        except JobStoreError as error:
            await self._fail(result.job_id, f"a result can't be stored: {error}")

    async def _fail(self, job_id: str, reason: str) -> None:
        logger().error("job_failed", job=job_id, reason=reason)
        await self._store.call(JobStore.fail, job_id, reason)
        self.stop_job(job_id)

    async def _blame(self) -> None:
        """The engine died during these requests: one of them may be why, so each runs alone from now on."""
        while self._died:
            job, pending = self._died.pop()
            pending = replace(pending, attempts=pending.attempts + 1)
            if pending.attempts >= MAX_ATTEMPTS:
                text = f"the engine failed {MAX_ATTEMPTS} times while this request ran"
                self._unsaved.append(_failure(pending, ApiError(500, text, code="engine_dead")))
                self._wake.set()
            else:
                job.again.appendleft(pending)
            await self._store.call(JobStore.count_attempt, job.id, pending.index)

    async def _tidy(self) -> None:
        now = time.monotonic()
        if now < self._tidy_at_s:
            return
        self._tidy_at_s = now + (_TIDY_S if self._active else _IDLE_TIDY_S)
        for job_id in await self._store.call(JobStore.expire):
            logger().warning("job_expired", job=job_id)
            self.stop_job(job_id)
        await self._store.call(JobStore.prune, self._retention_s)

    async def _stop(self) -> None:
        for job in [job for job in self._active if job.stopping]:
            for task in job.tasks:
                task.cancel()
            if not job.tasks:
                await self._store.call(JobStore.cancelled, job.id)
                self._active.remove(job)
                logger().info("job_stopped", job=job.id)
        ended = [job for job in self._active if self._ended(job)]
        for job in ended:
            self._active.remove(job)
            logger().info("job_completed", job=job.id)

    def _ended(self, job: _Active) -> bool:
        """Whether all of a job's requests have ended by themselves."""
        if not job.exhausted or job.tasks or job.again or job.stopping:
            return False
        # A request that is still to be blamed comes back.
        return not any(died is job for died, _ in self._died)

    async def _fill(self) -> None:
        while not self._ending and time.monotonic() >= self._paused_until_s and self._fits(1, self._answers):
            taken = await self._take()
            if taken is None:
                return
            job, pending = taken
            if job.stopping:
                continue
            if not self._fits(pending.answers, self._answers):
                job.again.appendleft(pending)
                return
            try:
                if not job.started:
                    await self._store.call(JobStore.start, job.id)
            except JobStoreError as error:
                await self._fail(job.id, f"its state can't be stored: {error}")
                continue
            job.started = True
            self._start(job, pending)

    async def _take(self) -> tuple[_Active, Pending] | None:
        """The next request to run, of the job whose turn it is."""
        while not self._alone:
            for job in self._active:
                if job.suspect and not job.stopping:
                    return (job, job.again.popleft()) if not self.num_running else None
            ready = [job for job in self._active if self._ready(job)]
            if not ready:
                return None
            job = ready[0]
            self._active.remove(job)
            self._active.append(job)
            if job.again:
                return job, job.again.popleft()
            pending = await self._store.call(JobStore.next_pending, job.id, job.cursor)
            if pending is None:
                job.exhausted = True
                continue
            job.cursor = pending.index
            if not pending.attempts:
                return job, pending
            job.again.append(pending)
        return None

    def _ready(self, job: _Active) -> bool:
        if job.stopping or len(job.tasks) >= (job.max_concurrency or len(job.tasks) + 1):
            return False
        return bool(job.again) or not job.exhausted

    def _start(self, job: _Active, pending: Pending) -> None:
        self._alone = pending.attempts > 0
        self._answers += pending.answers
        task = asyncio.create_task(self._run_one(job, pending))
        job.tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            job.tasks.discard(task)
            self._answers -= pending.answers
            self._alone = False
            self._wake.set()

        task.add_done_callback(ended)

    async def _run_one(self, job: _Active, pending: Pending) -> None:
        try:
            status, body = await self._execute(pending)
        except (OverloadedError, NotReadyError) as error:
            self._paused_until_s = time.monotonic() + error.retry_after_s
            job.again.append(pending)
        except EngineDeadError:
            self._paused_until_s = time.monotonic() + _AFTER_DEATH_S
            self._died.append((job, pending))
        except Exception as error:
            logger().error("job_request_failed", job=job.id, index=pending.index, exc_info=error)
            told = ApiError(500, "the server failed on this request", code="internal_error")
            self._unsaved.append(_failure(pending, told))
        else:
            self._unsaved.append(Finished(pending.job_id, pending.index, status, body))


def _failure(pending: Pending, error: ApiError) -> Finished:
    return Finished(pending.job_id, pending.index, error.status, error_bytes(error))
