"""Jobs: the store, what runs them, and what routes ask of both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

from sash.server.errors import ApiError
from sash.server.jobs.endpoints import execute
from sash.server.jobs.intake import Intake, fingerprint_of, read_job
from sash.server.jobs.records import (
    Job,
    JobStoreError,
    KeyReusedError,
    Order,
    Result,
    StoreFullError,
    TooManyJobsError,
)
from sash.server.jobs.runner import JobRunner
from sash.server.jobs.store import JobStore
from sash.server.jobs.thread import StoreThread
from sash.server.protocol.jobs import JobOptions
from sash.server.settings import ServerSettings
from sash.server.state import ServerState
from sash.spec.log import logger


def open_store(settings: ServerSettings) -> JobStore:
    """The store that the settings name.

    Raises:
        ConfigError: another server has it, or it is broken.
    """
    assert settings.jobs_dir is not None
    return JobStore(settings.jobs_dir, max_jobs=settings.jobs_max_stored, max_bytes=settings.jobs_max_bytes)


class Jobs:
    """What routes ask for. Raises ApiError."""

    def __init__(self, state: ServerState, store: StoreThread, runner: JobRunner) -> None:
        self._state = state
        self._store = store
        self._runner = runner

    def waiting_for(self, job: Job) -> str | None:
        """A model that would have to be served for a job to go on."""
        return None if not job.is_open or self._runner.serves(job) else ", ".join(job.models)

    async def counts(self) -> dict[str, int] | None:
        """Jobs in the store by their state; None where it can't be read."""
        try:
            return await self._store.call(JobStore.counts)
        except JobStoreError:
            return None

    async def create(
        self, body: bytes, content_type: str, options: JobOptions, key: str | None
    ) -> tuple[Job, bool, list[str]]:
        """Store a job. Returns it, whether it is new, and the fields of its requests that have no effect."""
        if key is not None:
            known = await self._store.call(JobStore.by_key, key)
            if known is not None and known.fingerprint == fingerprint_of(body, options):
                return known, False, []
        intake: Intake = await asyncio.to_thread(read_job, self._state, body, content_type, options, key)
        with _told():
            job, new = await self._store.call(JobStore.create, intake.job)
        if new:
            logger().info("job_stored", job=job.id, requests=job.total)
            self._runner.add(job)
        return job, new, intake.ignored

    async def get(self, job_id: str) -> Job:
        """One job."""
        job = await self._store.call(JobStore.get, job_id)
        if job is None:
            raise ApiError(404, f"there is no job {job_id[:100]!r}", param="job_id", code="job_not_found")
        return job

    async def jobs(self, after: str | None, limit: int) -> list[Job]:
        """Jobs, newest first; those older than the job ``after``."""
        if after is not None:
            await self.get(after)
        return await self._store.call(JobStore.jobs, after=after, limit=limit)

    async def cancel(self, job_id: str) -> Job:
        """Stop a job; one that has ended stays as it is."""
        with _told():
            await self._store.call(JobStore.request_cancel, job_id)
            if not self._runner.stop_job(job_id):
                await self._store.call(JobStore.cancelled, job_id)
        return await self.get(job_id)

    async def delete(self, job_id: str) -> None:
        """Forget a job that has ended."""
        job = await self.get(job_id)
        if job.is_open:
            raise ApiError(409, f"{job_id} is {job.state}; POST /v1/jobs/{job_id}/cancel first", code="job_open")
        with _told():
            await self._store.call(JobStore.delete, job_id)

    async def results(
        self, job_id: str, order: Order, after: int, limit: int | None
    ) -> AsyncIterator[tuple[Job, list[Result]]]:
        """Results, a piece at a time, with the job as it is then."""
        left = limit
        while left is None or left > 0:
            job, piece = await self._store.call(JobStore.results, job_id, order=order, after=after)
            if job is None:
                raise ApiError(404, f"{job_id} was deleted", code="job_not_found")
            if not piece:
                return
            if left is not None:
                piece = piece[:left]
                left -= len(piece)
            last = piece[-1]
            after = last.index if order == "input" or last.sequence is None else last.sequence
            yield job, piece


@contextmanager
def _told() -> Iterator[None]:
    """Errors of the store as answers."""
    try:
        yield
    except KeyReusedError as error:
        raise ApiError(409, str(error), param="Idempotency-Key", code="idempotency_key_reused") from None
    except TooManyJobsError as error:
        raise ApiError(429, str(error), code="too_many_jobs") from None
    except StoreFullError as error:
        raise ApiError(507, str(error), code="jobs_store_full") from None
    except JobStoreError as error:
        raise ApiError(500, str(error), code="jobs_store_failed") from None


@asynccontextmanager
async def running_jobs(state: ServerState) -> AsyncIterator[None]:
    """Open the store and run what is in it; at the end store what has ended, and leave the rest for the next start.

    Raises:
        ConfigError: see ``open_store``.
    """
    if state.settings.jobs_dir is None:
        yield
        return
    store = StoreThread(partial(open_store, state.settings))
    await store.start()
    settings = state.settings
    runner = JobRunner(
        store,
        partial(execute, state),
        partial(_fits, state),
        models=settings.names,
        retention_s=settings.jobs_retention_s,
    )
    state.jobs = Jobs(state, store, runner)
    task = asyncio.create_task(runner.run())
    try:
        yield
    finally:
        state.jobs = None
        runner.close()
        await task
        await store.close()


def _fits(state: ServerState, answers: int, running: int) -> bool:
    """Whether there are seats that nobody needs more. ``running`` covers those that are on their way to the engine."""
    engine, settings = state.engine, state.settings
    if state.draining or not engine.alive or engine.info is None:
        return False
    seats = settings.jobs_concurrency or max(engine.info.max_num_seqs * 3 // 4, 1)
    used = max(engine.num_open, running)
    # One that asks for more than all seats runs when nothing else does.
    return used == 0 or used + answers <= seats
