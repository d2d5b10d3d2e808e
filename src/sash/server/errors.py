"""OpenAI's error body, and how sash's errors become one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel

from sash.spec.errors import EngineDeadError, EngineStoppedError, ModelError, OverloadedError, RequestError, SashError


class ErrorDetail(BaseModel):
    """What went wrong; ``param`` names the field."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer above 399."""

    error: ErrorDetail


class ApiError(SashError):
    """An answer other than success. ``param`` names the field of the request that is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers or {}


DRAINING = "the server is shutting down; send the request to another one"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def as_api_error(error: SashError) -> ApiError:
    """sash's own errors with their status."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OverloadedError):
        return ApiError(429, str(error), code="overloaded", headers={"Retry-After": str(error.retry_after_s)})
    if isinstance(error, EngineStoppedError):
        return draining_error("the server shut down before the answer was done; send it again")
    if isinstance(error, EngineDeadError):
        return ApiError(500, str(error), code="engine_dead")
    if isinstance(error, RequestError | ModelError):
        return ApiError(400, str(error), param=_field_of(str(error)))
    return ApiError(500, str(error))


def draining_error(message: str) -> ApiError:
    """The answer to a request that comes, or isn't done, while the server shuts down."""
    return ApiError(503, message, code="draining", headers={"Connection": "close", "Retry-After": "5"})


def error_body(error: ApiError) -> dict[str, Any]:
    """The body of an error, also what a stream that has begun sends as its last event."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "internal_error")
    # A name or text that was no Unicode may be part of it.
    message = str(error).encode(errors="replace").decode()
    detail = ErrorDetail(message=message, type=kind, param=error.param, code=error.code)
    return ErrorBody(error=detail).model_dump()


def error_bytes(error: ApiError) -> bytes:
    """The body as JSON."""
    return msgspec.json.encode(error_body(error))


def error_response(error: ApiError) -> Response:
    """An error as a whole answer."""
    return Response(error_bytes(error), error.status, error.headers, "application/json")


# Fields that an error names beside the first.
_MOST_PLACES = 3
# How the framework names a branch of a union in the location of an error.
_TYPE = re.compile(r"(str|int|float|bool|dict|list|(function|constrained|tagged|lax|json)-[a-z-]+)(\[.*)?", re.DOTALL)


def as_field_error(error: RequestValidationError) -> ApiError:
    """A body, path or query that doesn't fit its model: 400 with the first field that is to blame, dotted; the message
    names others, too."""
    first, *rest = error.errors()
    param = _place(first["loc"]) or None
    message = str(first["msg"]).removeprefix("Value error, ")
    others = [place for place in dict.fromkeys(_place(one["loc"]) for one in rest) if place not in ("", param)]
    more = f" (wrong, too: {', '.join(others[:_MOST_PLACES])}{', …' * (len(others) > _MOST_PLACES)})" if others else ""
    return ApiError(400, f"{param}: {message}{more}" if param else f"the body: {message}{more}", param=param)


def _place(location: Sequence[int | str]) -> str:
    """A field, dotted. Beside fields and places a location names where it looked ("body") and, inside unions, types
    ("str", "list[int]")."""
    parts = [str(part)[:64] for part in location[1:] if isinstance(part, int) or not _TYPE.fullmatch(part)]
    return ".".join(parts)


def _field_of(message: str) -> str | None:
    """The field that a RequestError begins with: ``temperature must be …``."""
    first = re.split(r"[ =:]", message, maxsplit=1)[0]
    return first if (first.isidentifier() and "_" in first) or first in _FIELDS else None


_FIELDS = frozenset(
    {"n", "temperature", "stop", "seed", "logprobs", "prompt", "messages", "model", "tools", "text.format"}
)


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For a route's ``responses``: the error body of any status, with those named that it uses on purpose."""
    body = {"model": ErrorBody, "description": "OpenAI's error body"}
    return {**dict.fromkeys(statuses, body), "4XX": body, "5XX": body}
