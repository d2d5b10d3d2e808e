"""What the jobs store takes and gives: jobs, requests waiting to run, results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sash.spec.errors import SashError

State = Literal["queued", "running", "cancelling", "cancelled", "completed", "failed", "expired"]
Order = Literal["input", "finished"]
# A job in one of these still has something to run or to stop.
OPEN_STATES: tuple[State, ...] = ("queued", "running", "cancelling")


class JobStoreError(SashError):
    """The store's file can't be read or written; what was asked for has not happened."""


class StoreFullError(JobStoreError):
    """The disk is full, or the store has reached its own limit; what was asked for has not happened."""


class TooManyJobsError(SashError):
    """As many jobs are stored as may be; nothing was stored."""


class KeyReusedError(SashError):
    """An idempotency key came a second time with another body; nothing was stored."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """One request of a job: ``body`` is JSON for ``endpoint``, ``answers`` how many answers it asks for."""

    endpoint: str
    body: bytes
    custom_id: str | None = None
    answers: int = 1


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to be stored. ``models`` are those that its requests name; ``fingerprint`` tells two bodies apart that
    come with one ``idempotency_key``; ``expires_after_s`` counts from now."""

    requests: Sequence[NewRequest]
    models: Sequence[str] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    max_concurrency: int | None = None
    expires_after_s: float = 86400.0
    idempotency_key: str | None = None
    fingerprint: bytes = b""


@dataclass(frozen=True, slots=True)
class Job:
    """A stored job. Times are seconds since 1970; ``completed`` and ``failed`` of its ``total`` requests have results;
    ``error`` says why the job as a whole failed."""

    id: str
    state: State
    total: int
    completed: int
    failed: int
    models: tuple[str, ...]
    metadata: dict[str, str]
    max_concurrency: int | None
    created_at: float
    expires_at: float
    started_at: float | None
    ended_at: float | None
    error: str | None
    fingerprint: bytes

    @property
    def is_open(self) -> bool:
        """Whether it still has something to run or to stop."""
        return self.state in OPEN_STATES


@dataclass(frozen=True, slots=True)
class Pending:
    """A request without a result. ``attempts`` counts how often the engine has died while it ran."""

    job_id: str
    index: int
    endpoint: str
    body: bytes
    answers: int
    attempts: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A request's result: the HTTP status and the JSON body that the synchronous endpoint would have given."""

    job_id: str
    index: int
    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Result:
    """A line of a job's results. ``sequence`` grows in the order in which results were stored; it, ``status`` and
    ``body`` are None for a request that has none."""

    index: int
    custom_id: str | None
    sequence: int | None
    status: int | None
    body: bytes | None
