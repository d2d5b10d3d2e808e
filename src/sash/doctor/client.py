"""A small HTTP client for OpenAI-compatible servers, of the standard library alone."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sash.spec.errors import ConfigError, SashError


class ServerError(SashError):
    """The server can't be reached, or doesn't answer as an OpenAI-compatible one."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: status 0 means that it could not be read as JSON."""

    status: int
    body: Any


@dataclass(frozen=True, slots=True)
class Streamed:
    """A streamed answer: its text, seconds to the first piece and between pieces, and prompt tokens if told."""

    text: str
    first_s: float
    gaps_s: tuple[float, ...]
    prompt_tokens: int | None


class Client:
    """Talks to one server.

    Args:
        url: http://host:port, with or without /v1.
        api_key: sent as a bearer token where given.
        timeout_s: of a single read.

    Raises:
        ConfigError: no http or https address.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 120.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url!r} must begin with http:// or https://, such as http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s

    def _open(self, path: str, body: Mapping[str, Any] | None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=self._headers)
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=self._timeout_s)
        return response

    def call(self, path: str, body: Mapping[str, Any] | None = None) -> Reply:
        """GET, or POST with a body.

        Raises:
            ServerError: nobody answers.
        """
        try:
            with self._open(path, body) as response:
                return Reply(response.status, _json(response.read()))
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, _json(error.read()))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerError(f"{self.url}{path} can't be reached ({error}): is the server running there?") from error

    def stream(self, path: str, body: Mapping[str, Any]) -> Streamed:
        """POST and read the answer piece by piece.

        Raises:
            ServerError: nobody answers, or with an error.
        """
        started, times, text, tokens = time.perf_counter(), [], "", None
        try:
            with self._open(path, {**body, "stream": True, "stream_options": {"include_usage": True}}) as response:
                for event in _events(response):
                    if event.get("error"):
                        raise ServerError(f"{self.url}{path} broke off: {_message(event)}")
                    tokens = count_of(fields(event.get("usage")).get("prompt_tokens")) or tokens
                    if choice := first(event.get("choices")):
                        text += str(choice.get("text") or "")
                        times.append(time.perf_counter())
        except urllib.error.HTTPError as error:
            with error:
                raise ServerError(f"{self.url}{path} answered {error.code}: {_message(_json(error.read()))}") from error
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            raise ServerError(f"{self.url}{path} broke off ({error})") from error
        if not times:
            raise ServerError(f"{self.url}{path} streamed nothing")
        gaps = tuple(b - a for a, b in pairwise(times))
        return Streamed(text, times[0] - started, gaps, tokens)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        data = line.decode("utf-8", "replace").strip()
        if data.startswith("data:") and data != "data: [DONE]":
            event = json.loads(data[5:])
            if isinstance(event, dict):
                yield event


def fields(value: object) -> Mapping[str, Any]:
    """An object of an answer; none where something else stands there."""
    return value if isinstance(value, dict) else {}


def first(value: object) -> Mapping[str, Any]:
    """The first object of a list of them."""
    return fields(value[0]) if isinstance(value, list) and value else {}


def count_of(value: object) -> int | None:
    """A number of tokens, where it can be one."""
    return value if type(value) is int and 0 < value < 1 << 40 else None


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data.decode("utf-8", "replace")


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message") if isinstance(error, dict) else error or body)[:300]
