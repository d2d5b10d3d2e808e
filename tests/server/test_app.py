"""What happens to every request: errors, ids, keys, bodies, the log, draining."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import pytest
from tests.server.apps import CHAT, client_of, fake_engine, logged, post, refusal, serve
from tests.server.fake import FakeEngine

from sash.server.app import create_app
from sash.server.settings import ServerSettings
from sash.spec.errors import ConfigError

COMPLETIONS = "/v1/completions"


def get(path: str, method: str = "GET", headers: dict[str, str] | None = None, **settings: object) -> httpx.Response:
    answers = []

    async def test(client: httpx.AsyncClient) -> None:
        answers.append(await client.request(method, path, headers=headers))

    serve(test, **settings)
    return answers[0]


def test_unknown_paths_and_methods_get_an_error_body() -> None:
    unknown, wrong = get("/nope"), get("/health", "DELETE")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    assert "/nope" in unknown.json()["error"]["message"]
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET")
    assert set(wrong.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1 << 40]}, "prompt"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "max_tokens": 1 << 70}, "max_tokens"),
        ({"prompt": "a", "logit_bias": {"5": "x"}}, "logit_bias.5"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "stop": ["a", ""]}, "stop"),
        ({"prompt": "a", "stop": ["x"] * 257}, "stop"),
        ({"prompt": "a", "bad_words": ["x" * 257]}, "bad_words.0"),
        ({"prompt": "a", "bad_words": ["x"] * 1025}, "bad_words"),
        ({"prompt": "a", "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
        ({"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
    ],
)
def test_a_field_that_is_wrong_is_named(body: object, param: str) -> None:
    error = refusal(COMPLETIONS, body)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param.split(".")[0] in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, '{"prompt": "a", "structured_outputs": {"choice": %s}}'),
        ("/v1/responses", '{"input": "a", "text": {"format": {"type": "text", "extra": %s}}}'),
        ("/v1/responses", '{"input": [{"role": "user", "content": "a", "extra": %s}]}'),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "a", "extra": %s}]}'),
    ],
)
def test_what_can_be_read_and_not_be_used_is_nested_too_deeply(path: str, body: str) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        headers, statuses = {"content-type": "application/json"}, set()
        for depth in range(850, 1000):  # the stack has room for a thousand calls
            content = body % ("[" * depth + "]" * depth)
            statuses.add((await client.post(path, content=content, headers=headers)).status_code)
        assert 400 in statuses <= {200, 400}

    serve(test)


def test_fields_of_messages_are_named_with_their_place() -> None:
    wrong = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": 4}]}
    assert refusal("/v1/chat/completions", wrong)["param"] == "messages.1.content"
    assert refusal("/v1/chat/completions", {"messages": [{"content": "a"}]})["param"] == "messages.0.role"


@pytest.mark.parametrize(
    "data",
    [b"{", b'{"a":"\\ud800"}', b"[" * 100_000, b'{"prompt":NaN}', b"\xff\xfe", b'"text"', b"[]", b"null", b"5"],
)
def test_a_body_that_is_no_json_object_is_told(data: bytes) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        answer = await client.post(COMPLETIONS, content=data, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and "body" in answer.json()["error"]["message"]

    serve(test)


def test_an_empty_body_is_told() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        answer = await client.post(COMPLETIONS)
        assert answer.status_code == 400

    serve(test)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"])
def test_bodies_of_other_types_are_refused(kind: str) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        answer = await client.post(COMPLETIONS, content=b'{"prompt":"a"}', headers={"Content-Type": kind})
        assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]
        coded = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        assert (await client.post(COMPLETIONS, content=b"x", headers=coded)).status_code == 415

    serve(test)


def test_json_may_say_its_charset() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for kind in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.x+json"):
            answer = await client.post(COMPLETIONS, content=b'{"prompt":"a"}', headers={"Content-Type": kind})
            assert answer.status_code == 200, kind

    serve(test)


def test_a_body_that_is_too_large_is_refused_while_it_comes() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        read = 0

        async def endless() -> object:
            nonlocal read
            for _ in range(1000):
                read += 100
                yield b"x" * 100

        answer = await client.post(COMPLETIONS, content=endless(), headers={"Content-Type": "application/json"})
        assert answer.status_code == 413 and answer.headers["connection"] == "close"
        assert "1000 bytes" in answer.json()["error"]["message"]
        assert (await client.post(COMPLETIONS, json={"prompt": "a" * 900})).status_code == 400  # too long a prompt

    serve(test, fake_engine(refuse="prompt is too long"), max_body_bytes=1000)


def test_a_body_that_does_not_end_is_given_up() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async def slow() -> object:
            yield b"{"
            await asyncio.sleep(60)

        answer = await client.post(COMPLETIONS, content=slow(), headers={"Content-Type": "application/json"})
        assert answer.status_code == 408

    serve(test, request_timeout_s=0.05)


def test_requests_carry_an_id() -> None:
    assert get("/version", headers={"X-Request-Id": "abc-1.2:3_4"}).headers["x-request-id"] == "abc-1.2:3_4"
    for bad in ("a" * 129, "a b", "ä", 'a"b', "a\tb"):
        got = get("/version", headers={"X-Request-Id": bad.encode("latin-1")}).headers["x-request-id"]
        assert len(got) == 32 and got.isalnum()
    assert get("/version").headers["x-request-id"] != get("/version").headers["x-request-id"]


KEYS = ("first-key", "zweiter-schlüssel")


@pytest.mark.parametrize("path", ["/v1/models", "/version", "/load", "/openapi.json", "/docs", "/nope", "/metrics"])
def test_without_a_key_nothing_is_told(path: str) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic first-key"},
        {"Authorization": "first-key"},
        {"Authorization": "Bearer first-key2"},
    ):
        answer = get(path, headers=headers, api_keys=KEYS)
        assert answer.status_code == 401, headers
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"


def test_every_key_lets_in_and_health_needs_none() -> None:
    for key in KEYS:
        sent = {"Authorization": b"bearer " + key.encode()}
        assert get("/v1/models", headers=sent, api_keys=KEYS).status_code == 200
    for path in ("/health", "/ready"):
        assert get(path, api_keys=KEYS).status_code == 200
    assert get("/page/../v1/models", api_keys=KEYS).status_code == 401


def test_a_key_is_asked_for_before_the_body_is_read() -> None:
    answer = post(COMPLETIONS, {"prompt": "a"}, api_keys=KEYS)
    assert answer.status_code == 401


def test_keys_count_below_a_proxys_prefix() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        assert (await client.get("/proxy/health")).status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/proxy/v1/models")).status_code == 401

    serve(test, root_path="/proxy", api_keys=KEYS)


def test_what_nobody_foresaw_is_an_error_without_internals() -> None:
    class Broken(FakeEngine):
        def submit(self, *_: object) -> object:
            raise ZeroDivisionError("secret detail")

    engine = fake_engine()
    engine.__class__ = Broken
    with logged() as lines:
        answer = post(COMPLETIONS, {"prompt": "a"}, engine)
    assert answer.status_code == 500 and "secret" not in answer.text
    error = answer.json()["error"]
    assert error["type"] == "internal_error" and answer.headers["x-request-id"] in error["message"]
    failed = next(line for line in lines if line["event"] == "request_failed")
    assert "secret detail" in failed["error"] and failed["request_id"] == answer.headers["x-request-id"]


def test_the_log_has_a_line_for_each_request_and_no_prompt() -> None:
    with logged() as lines:
        post(COMPLETIONS, {"prompt": "top secret", "max_tokens": 3, "stream": True})
        get("/nope", headers={"X-Request-Id": "r1"})
        get("/health")
    assert "secret" not in json.dumps(lines)
    done, missing, routine = (line for line in lines if line["event"] == "request")
    assert done["status"] == 200 and done["path"] == COMPLETIONS and done["method"] == "POST"
    assert done["prompt_tokens"] == 10 and done["completion_tokens"] == 3 and done["finish_reasons"] == "length"
    assert done["duration_s"] > 0 and done["bytes_out"] > 300 and done["log_level"] == "info"
    assert (missing["request_id"], missing["status"]) == ("r1", 404)
    assert routine["log_level"] == "debug"


def test_prompts_are_logged_where_that_is_asked_for() -> None:
    with logged() as lines:
        post(COMPLETIONS, {"prompt": ["one", "two"]}, log_prompts=True)
    assert next(line for line in lines if line["event"] == "prompts")["prompts"] == ["one", "two"]


@pytest.mark.parametrize("how", [{}, {"stream": True}, {"background": True}])
def test_responses_are_logged_as_all_else_however_they_come(how: dict[str, bool]) -> None:
    with logged() as lines:
        post("/v1/responses", {"input": "hi"} | how, log_prompts=True)
    (prompts,) = (line["prompts"] for line in lines if line["event"] == "prompts")
    (done,) = (line for line in lines if line["event"] == "request")
    assert "hi" in prompts[0] and done["prompt_tokens"] == len(prompts[0])
    if "background" not in how:
        assert (done["completion_tokens"], done["finish_reasons"]) == (16, "length")


def test_draining_refuses_new_work_and_says_so() -> None:
    async def whole() -> None:
        engine = fake_engine()
        async with client_of(engine) as client:
            state = client._transport.app.state.server
            state.draining = True
            for path in (COMPLETIONS, "/v1/chat/completions", "/v1/responses", "/v1/jobs"):
                answer = await client.post(path, json=CHAT)
                assert answer.status_code == 503 and answer.headers["connection"] == "close"
                assert answer.json()["error"]["code"] == "draining"
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/v1/models")).status_code == 200
            assert not engine.prompts

    asyncio.run(whole())


def test_browsers_may_call_only_from_pages_that_are_named() -> None:
    page = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in get("/version", headers=page).headers
    named = {"cors_origins": ("https://page.example",)}
    allowed = get("/v1/completions", "OPTIONS", headers=page, api_keys=KEYS, **named)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://page.example")
    other = get("/version", headers={"Origin": "https://other.example"}, **named)
    assert "access-control-allow-origin" not in other.headers


def test_bytes_and_statuses_are_counted() -> None:
    async def whole() -> None:
        async with client_of(fake_engine()) as client:
            traffic = client._transport.app.state.server.traffic
            answer = await client.post(COMPLETIONS, json={"prompt": "a"})
            await client.get("/nope")
            assert traffic.bytes_in == len(answer.request.content)
            assert traffic.bytes_out > len(answer.content)
            assert traffic.statuses == {200: 1, 404: 1}

    asyncio.run(whole())


def test_a_template_that_can_not_be_read_stops_the_start(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match="chat_template"):
        create_app(fake_engine(), ServerSettings("tiny", chat_template=tmp_path / "none.jinja"))


def test_the_api_s_description_needs_no_internet() -> None:
    sources = re.findall(r'(?:src|href)="([^"]+)"', get("/docs").text)
    assert sources and all(source.startswith("/") for source in sources), sources
    assert all(get(source).status_code == 200 for source in sources)
