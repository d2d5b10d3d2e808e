"""/v1/jobs: many requests at once, answered when there is time for them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse

from sash.server.errors import ApiError, as_api_error, error_body, error_responses
from sash.server.jobs.records import Job, Order, Result
from sash.server.jobs.service import Jobs
from sash.server.middleware import header_of
from sash.server.protocol.jobs import (
    JobDeleted,
    JobItem,
    JobList,
    JobObject,
    JobOptions,
    JobRequest,
)
from sash.server.replies.common import encode
from sash.server.serving import ignored_headers
from sash.server.state import ServerState, state_of
from sash.spec.errors import SashError

router = APIRouter(tags=["jobs"])
_KEY = re.compile(r"[!-~]{1,255}", re.ASCII)
_MISSING = error_responses(401, 404)
_LINES_TYPE = "application/jsonl"


def _bodies() -> dict[str, Any]:
    """The OpenAPI description of what POST takes: the framework doesn't see the models, because it doesn't read it."""
    item, job = JobItem.model_json_schema(), JobRequest.model_json_schema()
    job.pop("$defs")
    job["properties"]["requests"]["anyOf"][0]["items"] = item
    content = {"application/json": {"schema": job}, _LINES_TYPE: {"schema": {"type": "string"}}}
    return {"requestBody": {"required": True, "content": content}}


async def jobs_of(state: Annotated[ServerState, Depends(state_of)]) -> Jobs:
    """The jobs of this server."""
    if state.jobs is None:
        raise ApiError(404, "there are no jobs here; start the server with --jobs-dir DIR", code="no_jobs")
    return state.jobs


TheJobs = Annotated[Jobs, Depends(jobs_of)]


@router.post(
    "/v1/jobs",
    status_code=202,
    response_class=Response,
    responses={
        202: {"model": JobObject, "description": "The job is stored and will run"},
        200: {"model": JobObject, "description": "The Idempotency-Key is known: the job that came with it"},
        **error_responses(400, 401, 404, 409, 413, 415, 429, 503, 507),
    },
    openapi_extra=_bodies(),
)
async def create_job(
    request: Request,
    jobs: TheJobs,
    max_concurrency: Annotated[int | None, Query(ge=1, le=1 << 20, description="For a body of lines.")] = None,
    expires_after_s: Annotated[float | None, Query(gt=0, le=30 * 86400, description="For a body of lines.")] = None,
) -> Response:
    """Store a job: JSON with requests or prompts, or JSON lines with a request each. All of them are checked first; one
    that is wrong, and nothing is stored. With the header Idempotency-Key a repeated request finds the job that it
    made."""
    key = header_of(request.scope, b"idempotency-key") or None
    if key is not None and not _KEY.fullmatch(key):
        raise ApiError(400, "Idempotency-Key must be 1 to 255 visible ASCII characters", param="Idempotency-Key")
    options = JobOptions(metadata=None, max_concurrency=max_concurrency, expires_after_s=expires_after_s)
    content_type = header_of(request.scope, b"content-type")
    job, new, ignored = await jobs.create(await request.body(), content_type, options, key)
    headers = {"Location": f"/v1/jobs/{job.id}", **ignored_headers(request, ignored)}
    return Response(encode(_object(jobs, job)), 202 if new else 200, headers, "application/json")


@router.get("/v1/jobs", response_class=Response, responses={200: {"model": JobList}, **error_responses(400, 401, 404)})
async def list_jobs(
    jobs: TheJobs,
    after: Annotated[str | None, Query(description="Id of the job after which to go on.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    """Jobs, newest first."""
    found = await jobs.jobs(after, limit + 1)
    page = [_object(jobs, job) for job in found[:limit]]
    answer: JobList = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(found) > limit,
    }
    return _json(answer)


@router.get("/v1/jobs/{job_id}", response_class=Response, responses={200: {"model": JobObject}, **_MISSING})
async def get_job(job_id: str, jobs: TheJobs) -> Response:
    """One job."""
    return _json(_object(jobs, await jobs.get(job_id)))


@router.get(
    "/v1/jobs/{job_id}/results",
    response_class=StreamingResponse,
    responses={
        200: {"description": "A JobResult in each line", "content": {_LINES_TYPE: {"schema": {"type": "string"}}}},
        **error_responses(400, 401, 404),
    },
)
async def job_results(
    job_id: str,
    jobs: TheJobs,
    order: Annotated[
        Order, Query(description="input: by index; finished: by sequence, so that a reader who comes back misses none.")
    ] = "input",
    after: Annotated[int, Query(ge=-1, le=1 << 62, description="Index or sequence after which to go on.")] = -1,
    limit: Annotated[int | None, Query(ge=1)] = None,
) -> StreamingResponse:
    """Results so far, read from disk line by line. In the order of the input a job that has ended has a line for each
    request, also for those that were never run."""
    await jobs.get(job_id)

    async def lines() -> AsyncIterator[bytes]:
        try:
            async for job, piece in jobs.results(job_id, order, after, limit):
                yield b"".join([_line(job, result) for result in piece])
        except SashError as error:
            # The status has gone out: a reader is to see that this is not the end.
            yield encode(error_body(as_api_error(error))) + b"\n"

    return StreamingResponse(lines(), media_type=_LINES_TYPE)


@router.post("/v1/jobs/{job_id}/cancel", response_class=Response, responses={200: {"model": JobObject}, **_MISSING})
async def cancel_job(job_id: str, jobs: TheJobs) -> Response:
    """Stop a job. What has ended keeps its results; a job that has ended stays as it is."""
    await jobs.get(job_id)
    return _json(_object(jobs, await jobs.cancel(job_id)))


@router.delete(
    "/v1/jobs/{job_id}",
    response_class=Response,
    responses={200: {"model": JobDeleted}, **error_responses(401, 404, 409)},
)
async def delete_job(job_id: str, jobs: TheJobs) -> Response:
    """Forget a job that has ended, and its results."""
    await jobs.delete(job_id)
    answer: JobDeleted = {"id": job_id, "object": "job", "deleted": True}
    return _json(answer)


def _json(answer: object) -> Response:
    return Response(encode(answer), media_type="application/json")


def _object(jobs: Jobs, job: Job) -> JobObject:
    return {
        "id": job.id,
        "object": "job",
        "status": job.state,
        "created_at": int(job.created_at),
        "started_at": None if job.started_at is None else int(job.started_at),
        "ended_at": None if job.ended_at is None else int(job.ended_at),
        "expires_at": int(job.expires_at),
        "counts": {
            "total": job.total,
            "completed": job.completed,
            "failed": job.failed,
            "remaining": job.total - job.completed - job.failed,
        },
        "models": list(job.models),
        "max_concurrency": job.max_concurrency,
        "metadata": job.metadata,
        "waiting_for": jobs.waiting_for(job),
        "error": job.error,
    }


_NEVER_RUN = {
    "cancelled": "the job was cancelled before this request had run",
    "expired": "the job's time was over before this request had run",
    "failed": "the job failed before this request had run",
}


def _line(job: Job, result: Result) -> bytes:
    """One result; an answer's own bytes go in as they are."""
    head = {
        "id": f"{job.id}-{result.index}",
        "index": result.index,
        "sequence": result.sequence,
        "custom_id": result.custom_id,
    }
    if result.body is None:
        error = {"code": f"job_{job.state}", "message": _NEVER_RUN[job.state]}
        return encode({**head, "response": None, "error": error}) + b"\n"
    response = {"status_code": result.status, "request_id": head["id"]}
    parts = (encode(head)[:-1], b',"response":', encode(response)[:-1], b',"body":', result.body, b'},"error":null}\n')
    return b"".join(parts)
