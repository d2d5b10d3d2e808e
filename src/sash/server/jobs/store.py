"""JobStore: jobs, their requests and their results in one SQLite file. Blocking; one thread at a time.

What is unfinished is what has no result: nothing on disk says that a request is running, so a process that is killed
leaves nothing to repair, and the next one runs exactly the requests without a result. A result and the counts and state
of its job are one transaction.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import get_args

from sash.server.jobs.database import FILE_NAME, open_database, take_lock
from sash.server.jobs.records import (
    OPEN_STATES,
    Finished,
    Job,
    JobStoreError,
    KeyReusedError,
    NewJob,
    Order,
    Pending,
    Result,
    State,
    StoreFullError,
    TooManyJobsError,
)

_COLUMNS = (
    "id, state, total, completed, failed, models, metadata, max_concurrency, "
    "created_at, expires_at, started_at, ended_at, error, fingerprint"
)
_OPEN = "({})".format(", ".join(f"'{state}'" for state in OPEN_STATES))
_ORDER_COLUMN = {"input": "r.idx", "finished": "s.sequence"}
# Results are read in pieces of about so many bytes.
_PIECE_BYTES = 256 << 10
# Pages that a transaction hands back to the file system after deleting.
_VACUUM_PAGES = 4096


class JobStore:
    """The jobs of one server.

    Args:
        folder: where the file lives; made if need be, and ours alone until ``close``.
        max_jobs: jobs that may be stored, ended ones included.
        max_bytes: the file's size limit.
        clock: seconds since 1970.

    Raises:
        ConfigError: another server uses the folder, or the file is broken; the way out is named.
    """

    def __init__(
        self, folder: Path, *, max_jobs: int = 1000, max_bytes: int = 8 << 30, clock: Callable[[], float] = time.time
    ) -> None:
        self._folder = folder
        self._max_jobs = max_jobs
        self._clock = clock
        # Jobs that have failed because nothing could be written, this news included; told from here until it can.
        self._failed: dict[str, str] = {}
        self._lock = take_lock(folder)
        try:
            self._db = open_database(folder / FILE_NAME, max_bytes)
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Let go of file and folder."""
        self._db.close()
        self._lock.close()

    def create(self, new: NewJob) -> tuple[Job, bool]:
        """Store a job; or, where its idempotency key is known, return the job that came with it and False.

        Raises:
            KeyReusedError: the key came with another body.
            TooManyJobsError: ``max_jobs`` are stored.
            StoreFullError: there is no room for it.
        """
        now = self._clock()
        with self._transaction():
            known = self.by_key(new.idempotency_key)
            if known is not None:
                if known.fingerprint != new.fingerprint:
                    raise KeyReusedError(
                        f"this Idempotency-Key came before, with another body ({known.id}); use a key of its own"
                    )
                return known, False
            (stored,) = self._db.execute("SELECT count(*) FROM jobs").fetchone()
            if stored >= self._max_jobs:
                raise TooManyJobsError(f"{stored} jobs are stored and no more may; DELETE some that have ended")
            job_id = f"job_{secrets.token_hex(12)}"
            row = self._db.execute(
                "INSERT INTO jobs (id, idempotency_key, fingerprint, state, total, max_concurrency, created_at, "
                "expires_at, models, metadata) VALUES (?, ?, ?, 'queued', ?, ?, ?, ?, ?, ?)",
                (
                    *(job_id, new.idempotency_key, new.fingerprint, len(new.requests), new.max_concurrency, now),
                    *(now + new.expires_after_s, json.dumps(list(new.models)), json.dumps(dict(new.metadata))),
                ),
            ).lastrowid
            self._db.executemany(
                "INSERT INTO requests (job, idx, custom_id, endpoint, answers, body) VALUES (?, ?, ?, ?, ?, ?)",
                ((row, i, r.custom_id, r.endpoint, r.answers, r.body) for i, r in enumerate(new.requests)),
            )
        job = self.get(job_id)
        assert job is not None
        return job, True

    def get(self, job_id: str) -> Job | None:
        """One job; None if there is none of this id."""
        return next(iter(self._select("WHERE id = ?", (job_id,))), None)

    def by_key(self, key: str | None) -> Job | None:
        """The job that came with an idempotency key."""
        return None if key is None else next(iter(self._select("WHERE idempotency_key = ?", (key,))), None)

    def jobs(self, *, after: str | None = None, limit: int = 20) -> list[Job]:
        """Jobs, newest first; those older than the job ``after``. None of that id: no jobs."""
        if after is None:
            return self._select("ORDER BY seq DESC LIMIT ?", (limit,))
        return self._select("WHERE seq < (SELECT seq FROM jobs WHERE id = ?) ORDER BY seq DESC LIMIT ?", (after, limit))

    def open_jobs(self) -> list[Job]:
        """Jobs that still have something to run or to stop, oldest first."""
        return [job for job in self._select(f"WHERE state IN {_OPEN} ORDER BY seq", ()) if job.is_open]

    def counts(self) -> dict[str, int]:
        """Jobs by their state."""
        counts = dict.fromkeys(get_args(State), 0)
        with self._reading():
            counts |= dict(self._db.execute("SELECT state, count(*) FROM jobs GROUP BY state"))
        return counts

    def next_pending(self, job_id: str, after: int) -> Pending | None:
        """The first request above index ``after`` that has no result."""
        with self._reading():
            row = self._db.execute(
                "SELECT r.idx, r.endpoint, r.body, r.answers, r.attempts FROM requests r JOIN jobs j ON j.seq = r.job "
                "WHERE j.id = ? AND r.idx > ? "
                "AND NOT EXISTS (SELECT 1 FROM results s WHERE s.job = r.job AND s.idx = r.idx) "
                "ORDER BY r.idx LIMIT 1",
                (job_id, after),
            ).fetchone()
        return None if row is None else Pending(job_id, *row)

    def start(self, job_id: str) -> None:
        """The first request of a queued job begins to run."""
        with self._transaction():
            self._db.execute(
                "UPDATE jobs SET state = 'running', started_at = ? WHERE id = ? AND state = 'queued'",
                (self._clock(), job_id),
            )

    def count_attempt(self, job_id: str, index: int) -> None:
        """The engine has died while this request ran."""
        with self._transaction():
            self._db.execute(
                "UPDATE requests SET attempts = attempts + 1 WHERE job = (SELECT seq FROM jobs WHERE id = ?) "
                "AND idx = ?",
                (job_id, index),
            )

    def finish(self, results: Sequence[Finished]) -> None:
        """Store results, and end the jobs that have all of theirs: all of it or nothing. What comes for a job that has
        ended or gone, or a second time, is dropped.

        Raises:
            StoreFullError: there is no room.
        """
        now = self._clock()
        with self._transaction():
            for result in results:
                row = self._db.execute(
                    f"SELECT seq FROM jobs WHERE id = ? AND state IN {_OPEN}", (result.job_id,)
                ).fetchone()
                if row is None or result.job_id in self._failed:
                    continue
                stored = self._db.execute(
                    "INSERT INTO results (job, idx, status, finished_at, body) VALUES (?, ?, ?, ?, ?) "
                    "ON CONFLICT (job, idx) DO NOTHING",
                    (row[0], result.index, result.status, now, result.body),
                ).rowcount
                if stored:
                    count = "completed" if result.status < 400 else "failed"
                    self._db.execute(f"UPDATE jobs SET {count} = {count} + 1 WHERE seq = ?", row)
                    self._end("seq = ? AND completed + failed = total", row, "completed")

    def request_cancel(self, job_id: str) -> Job | None:
        """Begin to stop a job; one that has ended stays as it is. ``cancelled`` completes it."""
        with self._transaction():
            self._db.execute(
                "UPDATE jobs SET state = 'cancelling' WHERE id = ? AND state IN ('queued', 'running')", (job_id,)
            )
        return self.get(job_id)

    def cancelled(self, job_id: str) -> None:
        """Nothing of a job that was to be stopped runs any more."""
        with self._transaction():
            self._end("id = ? AND state = 'cancelling'", (job_id,), "cancelled")

    def fail(self, job_id: str, reason: str) -> None:
        """End a job that can't go on. Holds even when the store can't be written: then only until the next start,
        which runs the rest of the job again."""
        self._failed[job_id] = reason
        self._write_failures()

    def expire(self) -> list[str]:
        """End the jobs whose time is over; returns their ids."""
        with self._transaction():
            where = "state IN ('queued', 'running') AND expires_at <= ?"
            late = [job_id for (job_id,) in self._db.execute(f"SELECT id FROM jobs WHERE {where}", (self._clock(),))]
            for job_id in late:
                self._end("id = ?", (job_id,), "expired")
        return late

    def prune(self, retention_s: float) -> int:
        """Forget jobs that ended more than ``retention_s`` ago; returns how many."""
        self._write_failures()
        with self._transaction():
            gone = self._db.execute("DELETE FROM jobs WHERE ended_at <= ?", (self._clock() - retention_s,)).rowcount
        if gone:
            self._shrink()
        return gone

    def delete(self, job_id: str) -> bool:
        """Forget a job that has ended, its requests and its results; False if there is none of this id.

        Raises:
            JobStoreError: it hasn't ended.
        """
        with self._transaction():
            job = self.get(job_id)
            if job is None:
                return False
            if job.is_open:
                raise JobStoreError(f"{job_id} is {job.state}; cancel it first")
            self._db.execute("DELETE FROM jobs WHERE id = ?", (job_id,))
            self._failed.pop(job_id, None)
        self._shrink()
        return True

    def results(self, job_id: str, *, order: Order = "input", after: int = -1) -> tuple[Job | None, list[Result]]:
        """The job as it is now, None if there is none of this id, and the next piece of its results: those above the
        index (``input``) or sequence number (``finished``) ``after``; empty at the end. In the order of the input a job
        that has ended has a line for every request.
        """
        job = self.get(job_id)
        if job is None:
            return None, []
        join = "LEFT JOIN" if order == "input" and not job.is_open else "JOIN"
        column = _ORDER_COLUMN[order]
        out: list[Result] = []
        size = 0
        with self._reading():
            rows = self._db.execute(
                f"SELECT r.idx, r.custom_id, s.sequence, s.status, s.body FROM requests r {join} results s "
                "ON s.job = r.job AND s.idx = r.idx "
                f"WHERE r.job = (SELECT seq FROM jobs WHERE id = ?) AND {column} > ? ORDER BY {column} LIMIT 1000",
                (job_id, after),
            )
            for row in rows:
                out.append(Result(*row))
                size += len(row[4] or b"")
                if size >= _PIECE_BYTES:
                    break
            # An open cursor would hold up the write-ahead log.
            rows.close()
        return job, out

    def check(self) -> None:
        """Raises AssertionError where the books don't balance."""
        for job_id, state, total, completed, failed in self._db.execute(
            "SELECT id, state, total, completed, failed FROM jobs"
        ).fetchall():
            counted = self._db.execute(
                "SELECT count(*), sum(s.status < 400), sum(s.status >= 400) FROM requests r "
                "LEFT JOIN results s ON s.job = r.job AND s.idx = r.idx "
                "WHERE r.job = (SELECT seq FROM jobs WHERE id = ?)",
                (job_id,),
            ).fetchone()
            assert counted[0] == total, f"{job_id} has {counted[0]} of {total} requests"
            assert (counted[1] or 0, counted[2] or 0) == (completed, failed), f"{job_id} counts {completed}, {failed}"
            assert (completed + failed == total) == (state == "completed"), f"{job_id} is {state}"
        orphans = self._db.execute("PRAGMA foreign_key_check").fetchall()
        assert not orphans, f"rows without a job: {orphans}"

    def _end(self, where: str, values: tuple[object, ...], state: str) -> None:
        self._db.execute(f"UPDATE jobs SET state = ?, ended_at = ? WHERE {where}", (state, self._clock(), *values))

    def _write_failures(self) -> None:
        for job_id, reason in list(self._failed.items()):
            try:
                with self._transaction():
                    self._db.execute(
                        f"UPDATE jobs SET state = 'failed', ended_at = ?, error = ? WHERE id = ? AND state IN {_OPEN}",
                        (self._clock(), reason, job_id),
                    )
            except JobStoreError:
                return
            del self._failed[job_id]

    def _select(self, rest: str, values: tuple[object, ...]) -> list[Job]:
        with self._reading():
            rows = self._db.execute(f"SELECT {_COLUMNS} FROM jobs {rest}", values).fetchall()
        return [self._told(_job(row)) for row in rows]

    def _told(self, job: Job) -> Job:
        reason = self._failed.get(job.id)
        if reason is None or not job.is_open:
            return job
        return replace(job, state="failed", ended_at=self._clock(), error=reason)

    def _shrink(self) -> None:
        # Pages that can't be handed back now are used again.
        with suppress(JobStoreError), self._reading():
            # execute() would stop after the first page: the statement has a step for each.
            self._db.executescript(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._translate(error) from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All that the block writes, or nothing."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except BaseException as error:
            # A full disk ends the transaction by itself.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise self._translate(error) from error
            raise

    def _translate(self, error: sqlite3.Error) -> JobStoreError:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
            return StoreFullError(
                f"the jobs store has no room left ({error}); "
                f"DELETE jobs that have ended, or free space in {self._folder}"
            )
        return JobStoreError(f"the jobs store in {self._folder} failed: {error}")


def _job(row: tuple[object, ...]) -> Job:
    names = [name.strip() for name in _COLUMNS.split(",")]
    fields = dict(zip(names, row, strict=True))
    fields["models"] = tuple(json.loads(str(fields["models"])))
    fields["metadata"] = json.loads(str(fields["metadata"]))
    return Job(**fields)  # type: ignore[arg-type]  # rows have the types that were written
