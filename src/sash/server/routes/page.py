"""The page at /: files that hold no data, so they need no key; what they show is asked for with one."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources

from fastapi import APIRouter, Request, Response

from sash.server.errors import ApiError

router = APIRouter(include_in_schema=False)

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Nothing from elsewhere, nothing inline, nobody's frame: text of a model can't become more than text.
_SECURITY = {
    "content-security-policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@cache
def _files() -> dict[str, tuple[bytes, str]]:
    """Content and tag of every file of the page, by name."""
    folder = resources.files("sash.server") / "page"
    files = {}
    for file in folder.iterdir():
        if file.name.rpartition(".")[2] in _TYPES:
            content = file.read_bytes()
            files[file.name] = (content, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return files


def _serve(request: Request, name: str) -> Response:
    found = _files().get(name)
    if found is None:
        raise ApiError(404, f"there is no /page/{name[:100]} here")
    content, tag = found
    headers = {**_SECURITY, "etag": tag, "content-type": _TYPES[name.rpartition(".")[2]]}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers)


@router.get("/")
async def index(request: Request) -> Response:
    """The page."""
    return _serve(request, "index.html")


@router.get("/page/{name}")
async def file(name: str, request: Request) -> Response:
    """One of its files."""
    return _serve(request, name)
