"""What happens to every request before a route sees it, as plain ASGI: a layer costs a call a chunk, no task.

Outermost first: ``RequestLog``, CORS where it is on, ``ApiKeys``, ``Drain``, ``Bodies``.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
import traceback
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sash.server.errors import DRAINING, ApiError, draining_error, error_bytes
from sash.server.state import ServerState
from sash.spec.log import logger

# Where new work comes in; refused while the server drains.
GENERATES = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/jobs"})
# May be read without a key: they tell nothing but that the server runs. The page's own files hold no data.
OPEN_PATHS = frozenset({"/health", "/ready", "/"})
OPEN_FOLDER = "/page/"
# Balancers and scrapers ask for these every few seconds.
_ROUTINE = frozenset({"/health", "/ready", "/metrics"})
_JSON = re.compile(r"application/([\w.-]+\+)?json\s*(;|$)", re.IGNORECASE)
# Requests of a job, one a line.
JSON_LINES = re.compile(r"application/(jsonl|jsonlines|x-jsonlines|x-ndjson|ndjson)\s*(;|$)", re.IGNORECASE)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)
_ID = "sash.request_id"
_NOTES = "sash.notes"
CLIENT_GONE = 499


class ClientGoneError(Exception):
    """The client has left: nobody reads an answer. ``RequestLog`` notes it as status 499."""


def request_id_of(scope: Scope) -> str:
    """The id under which a request stands in the log."""
    return str(scope.get(_ID, ""))


def note(scope: Scope, **fields: object) -> None:
    """Add fields to the request's line in the log. Never text of a prompt or an answer."""
    scope.setdefault(_NOTES, {}).update(fields)


def route_of(scope: Scope) -> str:
    """The path without the prefix under which a proxy publishes the server."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def header_of(scope: Scope, name: bytes) -> str:
    """A request header; empty when missing."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


async def send_error(send: Send, error: ApiError) -> None:
    """An error as a whole answer."""
    body = error_bytes(error)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class RequestLog:
    """Gives each request its id, counts bytes, writes its line in the log, and answers for what nobody foresaw."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._state.settings.root_path:
            scope["root_path"] = self._state.settings.root_path.rstrip("/")
        given = header_of(scope, b"x-request-id")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope[_ID] = request_id
        notes: dict[str, object] = {}
        scope[_NOTES] = notes
        own_header = (b"x-request-id", request_id.encode())
        started_s, status, bytes_out = time.monotonic(), 0, 0

        async def counted(message: Message) -> None:
            nonlocal status, bytes_out
            if message["type"] == "http.response.body":
                bytes_out += len(message.get("body", b""))
            elif message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), own_header]}
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except ClientGoneError:
            status = status or CLIENT_GONE
            notes["client_gone"] = True
        except Exception as error:  # whatever it is: one request fails, the server goes on
            logger().error("request_failed", request_id=request_id, error="".join(traceback.format_exception(error)))
            if not status:
                text = f"the server failed on this request; its log has the reason under {request_id}"
                await send_error(counted, ApiError(500, text, code="internal_error"))
        finally:
            self._note(scope, status, bytes_out, time.monotonic() - started_s)

    def _note(self, scope: Scope, status: int, bytes_out: int, duration_s: float) -> None:
        traffic = self._state.traffic
        traffic.bytes_out += bytes_out
        traffic.statuses[status] = traffic.statuses.get(status, 0) + 1
        path = route_of(scope)
        if path in GENERATES and scope["method"] == "POST":
            self._state.metrics.on_status(status, draining=self._state.draining)
        log = logger()
        (log.debug if path in _ROUTINE and status < 400 else log.info)(
            "request",
            request_id=scope[_ID],
            method=scope["method"],
            path=path[:200],
            status=status,
            duration_s=round(duration_s, 6),
            bytes_out=bytes_out,
            client=(scope.get("client") or [""])[0],
            **scope[_NOTES],
        )


class ApiKeys:
    """Lets in who brings ``Authorization: Bearer KEY`` with one of the keys."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        # Digests are of one length, so that not even a key's length shows in the time that a comparison takes.
        self._keys = [_digest(key.encode()) for key in state.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and not needs_no_key(route_of(scope)):
            scheme, _, given = header_of(scope, b"authorization").partition(" ")
            if scheme.lower() != "bearer" or not self._known(given.strip().encode("latin-1")):
                text = "a key is needed: send the header Authorization: Bearer KEY"
                error = ApiError(401, text, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
                await send_error(send, error)
                return
        await self._app(scope, receive, send)

    def _known(self, given: bytes) -> bool:
        """Compares with every key in full, so that time tells nothing."""
        digest, found = _digest(given), False
        for key in self._keys:
            found |= hmac.compare_digest(digest, key)
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def needs_no_key(path: str) -> bool:
    """Whether everybody may read it."""
    return path in OPEN_PATHS or (path.startswith(OPEN_FOLDER) and ".." not in path)


class Drain:
    """Refuses new work once the server ends; what runs goes on."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        new = self._state.draining and scope["type"] == "http" and scope["method"] == "POST"
        if new and route_of(scope) in GENERATES:
            await send_error(send, draining_error(DRAINING))
            return
        await self._app(scope, receive, send)


class Bodies:
    """Reads request bodies, whole: as many bytes as are allowed, JSON only, in a limited time."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._limit = state.settings.max_body_bytes
        self._timeout_s = state.settings.request_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                body = await self._read(receive)
            if body:
                _check_headers(scope)
        except TimeoutError:
            await send_error(send, _closing(408, f"the body took longer than {self._timeout_s:g} s"))
            return
        except ApiError as error:
            await send_error(send, error)
            return
        self._state.traffic.bytes_in += len(body)
        first = True

        async def replay() -> Message:
            nonlocal first
            if first:
                first = False
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > self._limit:
                raise _closing(413, f"the body is larger than the {self._limit} bytes that are allowed")
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)


def _check_headers(scope: Scope) -> None:
    kind, coding = header_of(scope, b"content-type"), header_of(scope, b"content-encoding")
    lines = route_of(scope) == "/v1/jobs" and JSON_LINES.match(kind)
    if not _JSON.match(kind) and not lines:
        raise ApiError(415, f"the body must be JSON with the header Content-Type: application/json, got {kind[:100]!r}")
    if coding.lower() not in ("", "identity"):
        raise ApiError(415, f"the body must come as it is, not with Content-Encoding {coding[:100]!r}")


def _closing(status: int, text: str) -> ApiError:
    """An error after which the rest of the body can't be skipped."""
    return ApiError(status, text, headers={"Connection": "close"})


def layers(state: ServerState) -> list[tuple[Any, dict[str, Any]]]:
    """Classes and arguments, outermost first."""
    out: list[tuple[Any, dict[str, Any]]] = [(RequestLog, {"state": state})]
    if state.settings.cors_origins:
        from starlette.middleware.cors import CORSMiddleware

        cors = {
            "allow_origins": list(state.settings.cors_origins),
            "allow_methods": ["GET", "POST", "DELETE"],
            "allow_headers": ["Authorization", "Content-Type", "Idempotency-Key", "X-Request-Id"],
            "expose_headers": ["X-Request-Id", "X-Sash-Ignored", "Retry-After"],
        }
        out.append((CORSMiddleware, cors))
    return [*out, *((layer, {"state": state}) for layer in (ApiKeys, Drain, Bodies))]
