"""From the body of POST /v1/jobs to a job that can be stored: every request is checked, or the whole is refused."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from sash.server.errors import ApiError
from sash.server.jobs.endpoints import check, parse
from sash.server.jobs.records import NewJob, NewRequest
from sash.server.middleware import JSON_LINES
from sash.server.protocol.jobs import JobItem, JobOptions
from sash.server.state import ServerState

_DAY_S = 86400.0
_NULL = msgspec.Raw(b"null")


@dataclass(frozen=True, slots=True)
class Intake:
    """A job and the fields of its requests that will have no effect."""

    job: NewJob
    ignored: list[str]


@dataclass(frozen=True, slots=True)
class _Given:
    """A request as it came. ``where`` names it to people, ``prefix`` stands before a field's name."""

    item: JobItem
    where: str
    prefix: str


def read_job(state: ServerState, body: bytes, content_type: str, options: JobOptions, key: str | None) -> Intake:
    """A job from a body: JSON, or a line of JSON for each request; ``options`` are those that came beside it. Takes up
    to seconds: not for the event loop.

    Raises:
        ApiError: 400 with the index and field that is to blame.
    """
    fingerprint = fingerprint_of(body, options)
    ignored: dict[str, None] = {}
    if JSON_LINES.match(content_type):
        given = _from_lines(body)
    else:
        top = _decode(body, dict[str, msgspec.Raw], "the body")
        wholes = {name: raw for name in ("requests", "prompts") if bytes(raw := top.pop(name, _NULL)) != b"null"}
        rest = {name: _decode(raw, Any, name) for name, raw in top.items()}
        options = _merged(options, parse(JobOptions, rest))
        if len(wholes) != 1:
            raise ApiError(400, "give either requests or prompts", param="requests")
        if "requests" in wholes:
            given = _from_requests(wholes["requests"])
            ignored |= dict.fromkeys(options.model_extra or ())
        else:
            given = _from_prompts(wholes["prompts"], options.model_extra or {})
    requests, models = _checked(state, given, ignored)
    job = NewJob(
        requests,
        models=models,
        metadata=options.metadata or {},
        max_concurrency=options.max_concurrency,
        expires_after_s=options.expires_after_s or _DAY_S,
        idempotency_key=key,
        fingerprint=fingerprint,
    )
    return Intake(job, list(ignored))


def fingerprint_of(body: bytes, options: JobOptions) -> bytes:
    """Tells whether two requests with one idempotency key are the same."""
    digest = hashlib.sha256(options.model_dump_json().encode())
    digest.update(body)
    return digest.digest()


def _checked(
    state: ServerState, given: Iterator[_Given], ignored: dict[str, None]
) -> tuple[list[NewRequest], list[str]]:
    most = state.settings.jobs_max_requests
    requests: list[NewRequest] = []
    models: dict[str, None] = {}
    ids: dict[str, str] = {}
    for one in given:
        if len(requests) >= most:
            raise ApiError(400, f"requests: at most {most} in one job; send the rest as another", param="requests")
        item = one.item
        try:
            found = check(state, item.endpoint, item.body)
        except ApiError as error:
            param = f"{one.prefix}{error.param or ''}".rstrip(".")
            told = one.where if param == "prompt" else param
            raise ApiError(error.status, f"{one.where}: {error}", param=told, code=error.code) from None
        if item.custom_id is not None:
            if item.custom_id in ids:
                told = f"{one.where}: its custom_id is that of {ids[item.custom_id]}; give each its own"
                raise ApiError(400, told, param=f"{one.prefix.removesuffix('body.')}custom_id")
            ids[item.custom_id] = one.where
        models[found.model] = None
        ignored |= dict.fromkeys((*found.ignored, *(item.model_extra or ())))
        requests.append(NewRequest(item.endpoint, msgspec.json.encode(item.body), item.custom_id, found.answers))
        # Lets the event loop have the interpreter.
        time.sleep(0)
    if not requests:
        raise ApiError(400, "requests is empty; give at least one", param="requests")
    return requests, list(models)


def _from_requests(raw: msgspec.Raw) -> Iterator[_Given]:
    for i, item in enumerate(_decode(raw, list[msgspec.Raw], "requests")):
        yield _given(item, f"requests[{i}]", f"requests[{i}]")


def _from_lines(body: bytes) -> Iterator[_Given]:
    count = 0
    for number, line in enumerate(body.split(b"\n"), 1):
        if line.strip():
            yield _given(line, f"line {number}", f"requests[{count}]")
            count += 1


def _from_prompts(raw: msgspec.Raw, fields: dict[str, Any]) -> Iterator[_Given]:
    for i, prompt in enumerate(_decode(raw, list[Any], "prompts")):
        if not isinstance(prompt, str | list) or (isinstance(prompt, list) and not _is_ids(prompt)):
            told = f"prompts[{i}] must be a text or a list of token ids"
            raise ApiError(400, told, param=f"prompts[{i}]")
        item = JobItem(custom_id=None, endpoint="/v1/completions", body={**fields, "prompt": prompt})
        yield _Given(item, f"prompts[{i}]", "")


def _is_ids(prompt: list[Any]) -> bool:
    return bool(prompt) and all(type(token) is int for token in prompt)


def _given(raw: bytes | msgspec.Raw, where: str, prefix: str) -> _Given:
    try:
        given = _decode(raw, Any, where)
    except ApiError as error:
        raise ApiError(400, str(error), param=prefix) from None
    try:
        return _Given(parse(JobItem, given), where, f"{prefix}.body.")
    except ApiError as error:
        param = f"{prefix}.{error.param}" if error.param else prefix
        raise ApiError(400, f"{where}: {error}", param=param) from None


def _decode(raw: bytes | msgspec.Raw, form: Any, what: str) -> Any:
    try:
        return msgspec.json.decode(raw, type=form)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ApiError(400, f"{what}: {error}") from None
    except msgspec.DecodeError as error:
        raise ApiError(400, f"{what} is not valid JSON: {error}") from None


def _merged(options: JobOptions, more: JobOptions) -> JobOptions:
    given = {name: value for name, value in options if value is not None and getattr(more, name, None) is None}
    return more.model_copy(update=given)
