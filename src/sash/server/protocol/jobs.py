"""/v1/jobs: its request, the job object, and a line of its results."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field
from typing_extensions import TypedDict

from sash.server.jobs.records import State
from sash.server.protocol.common import Body, Positive

Path = Literal["/v1/completions", "/v1/chat/completions", "/v1/responses"]
MAX_METADATA = 16
_DAY_S = 86400.0


class JobItem(Body):
    """One request of a job; ``url`` is another name of ``endpoint``."""

    custom_id: str | None = Field(None, min_length=1, max_length=512, description="Comes back with the result.")
    method: Literal["POST"] | None = None
    endpoint: Path = Field(validation_alias=AliasChoices("endpoint", "url"))
    body: dict[str, Any] = Field(description="What the endpoint takes; without stream.")


class JobOptions(Body):
    """What a job says beside its requests."""

    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        None, max_length=MAX_METADATA
    )
    max_concurrency: Positive | None = Field(
        None, description="Requests of this job that run at a time; left out: as many as there is room for."
    )
    expires_after_s: float | None = Field(
        None, gt=0, le=30 * _DAY_S, description="Seconds after which an unfinished job ends; a day when not given."
    )


class JobRequest(JobOptions):
    """Requests to be answered when there is time for them: ``requests``, or ``prompts`` with the fields that
    /v1/completions takes, which then hold for each of them."""

    requests: list[JobItem] | None = Field(None, min_length=1)
    prompts: list[Any] | None = Field(None, min_length=1, description="Texts, or lists of token ids.")


class JobCounts(TypedDict):
    """Of ``total`` requests ``completed`` have an answer, ``failed`` an error; ``remaining`` have none yet."""

    total: int
    completed: int
    failed: int
    remaining: int


class JobObject(TypedDict):
    """A job. ``waiting_for`` names a model that the server would have to serve for it to go on; ``error`` says why the
    job as a whole failed."""

    id: str
    object: Literal["job"]
    status: State
    created_at: int
    started_at: int | None
    ended_at: int | None
    expires_at: int
    counts: JobCounts
    models: list[str]
    max_concurrency: int | None
    metadata: dict[str, str]
    waiting_for: str | None
    error: str | None


class JobList(TypedDict):
    """Jobs, newest first."""

    object: Literal["list"]
    data: list[JobObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class JobDeleted(TypedDict):
    """A job that is no more."""

    id: str
    object: Literal["job"]
    deleted: Literal[True]


class JobResponse(TypedDict):
    """What the endpoint would have answered."""

    status_code: int
    request_id: str
    body: dict[str, Any]


class JobError(TypedDict):
    """Why a request has no answer of its own."""

    code: str
    message: str


class JobResult(TypedDict):
    """A line of a job's results. ``index`` is the request's place in the job; ``sequence`` grows in the order in which
    requests ended."""

    id: str
    index: int
    sequence: int | None
    custom_id: str | None
    response: JobResponse | None
    error: JobError | None
