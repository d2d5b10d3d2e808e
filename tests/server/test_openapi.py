"""The OpenAPI document: every route says what it takes, what it answers and how it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.server.apps import fake_engine

from sash.server.app import create_app
from sash.server.settings import ServerSettings

DOCUMENT = create_app(fake_engine(), ServerSettings("tiny")).openapi()
OPERATIONS = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]


def operation(path: str, method: str, document: dict[str, Any] = DOCUMENT) -> dict[str, Any]:
    return dict(document["paths"][path][method])


def test_the_page_about_the_interface_names_every_path() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    assert {path for path in DOCUMENT["paths"] if path.split("/{")[0] not in page} == set()
    actions = {path.rpartition("}")[2] for path in DOCUMENT["paths"] if "}/" in path}
    assert {action for action in actions if f"…{action}" not in page} == set()


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_route_describes_its_success_and_its_errors(path: str, method: str) -> None:
    described = operation(path, method)
    responses = described["responses"]
    assert "422" not in responses and described["description"] and described["tags"]
    for status in ("4XX", "5XX"):
        assert responses[status]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorBody")
    if path not in ("/health", "/ready"):
        assert responses["200"]["content"]
    if method == "post" and not path.endswith("/cancel"):
        schema = described["requestBody"]["content"]["application/json"]["schema"]
        assert schema.keys() & {"$ref", "properties"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streams_are_declared(path: str) -> None:
    assert set(operation(path, "post")["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}


def test_where_keys_are_wanted_is_told() -> None:
    locked = create_app(fake_engine(), ServerSettings("tiny", api_keys=("k",))).openapi()
    assert locked["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert operation("/v1/models", "get", locked)["security"] == [{"key": []}]
    assert "security" not in operation("/health", "get", locked)
    assert "security" not in operation("/v1/models", "get")


def test_bounds_are_json_schemas_own() -> None:
    def keys(node: object) -> set[str]:
        if isinstance(node, dict):
            return set(node) | set().union(*map(keys, node.values()))
        return set().union(*map(keys, node)) if isinstance(node, list) else set()

    assert not keys(DOCUMENT["components"]) & {"ge", "gt", "le", "lt"}
    n = DOCUMENT["components"]["schemas"]["CompletionRequest"]["properties"]["n"]["anyOf"][0]
    assert n == {"type": "integer", "minimum": 1, "maximum": 1024}
