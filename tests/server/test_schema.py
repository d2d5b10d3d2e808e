"""The OpenAPI description, held against the app: what it allows is answered as it says, what it forbids is refused."""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import jsonschema
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import positive_data_acceptance, response_schema_conformance
from tests.server.apps import fake_engine, logged

from sash.server.app import create_app
from sash.server.settings import ServerSettings

# A schema can't say everything: that best_of must be n, or that a prompt must have a token.
NOT_CHECKED = [positive_data_acceptance]
MANY = os.environ.get("SASH_TEST_PROFILE") == "all"
SILENT = {
    "deadline": None,
    "derandomize": not MANY,
    "database": None,
    "suppress_health_check": list(hypothesis.HealthCheck),
}


def schema_of(keys: tuple[str, ...] = (), **engine: Any) -> Any:
    """The description of an app around a scripted engine."""
    app = create_app(fake_engine(**engine), ServerSettings(model_name="tiny", api_keys=keys))
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    return schemathesis.openapi.from_asgi("/openapi.json", app, headers=headers)


def operations() -> list[tuple[str, str]]:
    """Path and method of each, from the app itself: a new route is tested from its first day. What only streams is
    left out: it may go on for ever."""
    described = create_app(fake_engine(), ServerSettings(model_name="tiny")).openapi()
    listed = [(path, method, what) for path, item in described["paths"].items() for method, what in item.items()]
    endless = {"text/event-stream"}
    return [
        (path, method)
        for path, method, what in listed
        if set(what["responses"].get("200", {}).get("content", ())) != endless
    ]


OPERATIONS = operations()
# Nothing is forbidden to those that take no body: an id may be any text.
WITH_BODY = [(path, method) for path, method in OPERATIONS if method == "post" and not path.endswith("/cancel")]
SCHEMA: Any = schema_of()


def check(operation: Any, mode: GenerationMode, count: int, excluded: list[Any]) -> set[int]:
    """Statuses that came for ``count`` generated requests, each of them as described."""
    statuses: set[int] = set()

    @hypothesis.settings(max_examples=count, **SILENT)
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def each(case: Any) -> None:
        response = case.call()
        statuses.add(response.status_code)
        case.validate_response(response, excluded_checks=excluded)

    with logged():
        each()
    return statuses


# The tool takes tuples' schemas (prefixItems) for those of an older draft in answers.
BY_HAND = ["/stats"]


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_what_the_description_allows_is_answered_as_it_says(path: str, method: str) -> None:
    excluded = [*NOT_CHECKED, *([response_schema_conformance] if path in BY_HAND else [])]
    statuses = check(SCHEMA[path][method], GenerationMode.POSITIVE, 300 if MANY else 40, excluded)
    assert statuses and not any(status >= 500 for status in statuses)


@pytest.mark.parametrize("path", BY_HAND)
def test_what_the_tool_can_not_check(path: str) -> None:
    schema = SCHEMA.raw_schema["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    with logged():
        answer = SCHEMA[path]["get"].Case().call().json()
    jsonschema.Draft202012Validator(schema).validate(answer)


@pytest.mark.parametrize(("path", "method"), WITH_BODY)
def test_what_the_description_forbids_is_refused(path: str, method: str) -> None:
    statuses = check(SCHEMA[path][method], GenerationMode.NEGATIVE, 300 if MANY else 40, NOT_CHECKED)
    assert statuses and all(400 <= status < 500 for status in statuses)


@pytest.mark.parametrize(
    ("engine", "keys", "want"),
    [
        ({"overloaded": True}, (), 429),
        ({"alive": False}, (), 503),
        ({"refuse": "prompt has too many tokens"}, (), 400),
        ({"die_after": 0}, (), 500),
        ({"script": lambda *_: ["error"]}, (), 500),
        ({"script": lambda *_: ["timeout"]}, (), 504),
        ({}, ("key",), 401),
    ],
)
def test_trouble_is_described_too(engine: dict[str, Any], keys: tuple[str, ...], want: int) -> None:
    schema = schema_of(keys, **engine)
    case = schema["/v1/completions"]["post"].Case(body={"prompt": "Hello"}, media_type="application/json")
    with logged():
        response = case.call(headers={"Authorization": "Bearer other"} if keys else None)
        assert response.status_code == want
        case.validate_response(response, excluded_checks=[*NOT_CHECKED, not_a_server_error])
