"""What may be posted, and what is refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from tests.server.jobs.client import Client, Json, completion, serve

from sash.server.protocol.jobs import JobResult


def test_a_job_of_both_apis_answers_as_the_endpoints_do(folder: Path) -> None:
    async def test(client: Client) -> None:
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        requests = [
            {"custom_id": "a", **completion()},
            {"custom_id": "b", "endpoint": "/v1/chat/completions", "body": chat},
            {"url": "/v1/completions", "method": "POST", "body": {"prompt": ["x", "y"], "n": 2, "max_tokens": 1}},
            {"endpoint": "/v1/responses", "body": {"input": "hi", "store": False, "max_output_tokens": 2}},
        ]
        posted = await client.post({"requests": requests, "metadata": {"for": "test"}, "max_concurrency": 2})
        assert posted["object"] == "job" and posted["status"] in ("queued", "running")
        assert posted["metadata"] == {"for": "test"} and posted["models"] == ["tiny"]
        assert posted["counts"] == {"total": 4, "completed": 0, "failed": 0, "remaining": 4}
        job = await client.ended(posted)
        assert job["counts"] == {"total": 4, "completed": 4, "failed": 0, "remaining": 0}
        assert job["created_at"] <= job["started_at"] <= job["ended_at"] <= job["expires_at"]
        lines = await client.results(job)
        assert [line["custom_id"] for line in lines] == ["a", "b", None, None]
        assert [line["index"] for line in lines] == [0, 1, 2, 3]
        TypeAdapter(list[JobResult]).validate_python(lines, strict=True)
        for line, request in zip(lines, requests, strict=True):
            assert line["error"] is None and line["response"]["status_code"] == 200
            path = request.get("endpoint") or request["url"]
            direct = (await client.http.post(path, json=request["body"])).json()
            assert without_id(line["response"]["body"]) == without_id(direct)

    serve(folder, test)


def test_the_documentations_example_runs(folder: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "api.md"
    example = page.read_text(encoding="utf-8").split("## Jobs")[1].split("```json\n")[1].split("```")[0]

    async def test(client: Client) -> None:
        job = await client.ended(await client.post(json.loads(example)))
        assert job["counts"]["completed"] == 2 and job["max_concurrency"] == 2
        assert [line["custom_id"] for line in await client.results(job)] == ["a", "b"]

    serve(folder, test)


def without_id(body: Json) -> Json:
    body = {name: value for name, value in body.items() if name not in ("id", "created", "created_at", "completed_at")}
    for item in body.get("output", ()):
        del item["id"]
    return body


def test_one_set_of_fields_for_many_prompts(folder: Path) -> None:
    async def test(client: Client) -> None:
        job = await client.post({"model": "tiny", "prompts": ["ab", [3, 4, 5]], "max_tokens": 2, "temperature": 0})
        await client.ended(job)
        assert [line["response"]["body"]["usage"]["completion_tokens"] for line in await client.results(job)] == [2, 2]
        assert sorted(map(len, client.engine.prompts)) == [2, 3]
        assert all(params.temperature == 0 for params in client.engine.params)

    serve(folder, test)


def test_lines_as_in_batch_files(folder: Path) -> None:
    async def test(client: Client) -> None:
        lines = [
            {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": completion(f"p{i}")["body"]}
            for i in range(3)
        ]
        body = b"\n".join(json.dumps(line).encode() for line in lines) + b"\n\n"
        job = await client.post(body, headers={"Content-Type": "application/jsonl"}, params={"max_concurrency": 1})
        assert job["max_concurrency"] == 1 and job["counts"]["total"] == 3
        await client.ended(job)
        assert [line["custom_id"] for line in await client.results(job)] == ["r0", "r1", "r2"]

    serve(folder, test)


WRONG: list[tuple[Any, str | None, str]] = [
    ({"requests": [completion(), completion(temperature=-1)]}, "requests[1].body.temperature", "requests[1]"),
    ({"requests": [completion(), {"endpoint": "/v1/nothing", "body": {}}]}, "requests[1].endpoint", "requests[1]"),
    ({"requests": [completion(stream=True)]}, "requests[0].body.stream", "stream is not supported in a job"),
    (
        {"requests": [{"endpoint": "/v1/responses", "body": {"input": "a", "background": True}}]},
        "requests[0].body.background",
        "background is not supported in a job",
    ),
    ({"requests": [completion(best_of=3)]}, "requests[0].body.best_of", "best_of must be n"),
    ({"requests": [completion(suffix="x")]}, "requests[0].body.suffix", "suffix"),
    ({"requests": [{"endpoint": "/v1/completions"}]}, "requests[0].body", "Field required"),
    ({"requests": [{}]}, "requests[0].endpoint", "requests[0]: endpoint: Field required (wrong, too: body)"),
    ({"requests": [5]}, "requests[0]", "requests[0]: the body: Input should be"),
    ({"requests": []}, "requests", "requests is empty"),
    ({"requests": {}}, None, "requests: Expected `array`"),
    ({"requests": None, "prompts": None}, "requests", "give either requests or prompts"),
    ({"requests": [completion()], "prompts": ["a"]}, "requests", "give either requests or prompts"),
    ({"requests": [completion()] * 4}, "requests", "at most 3 in one job"),
    (
        {"requests": [{"custom_id": "a", **completion()}, {"custom_id": "a", **completion()}]},
        "requests[1].custom_id",
        "its custom_id is that of requests[0]",
    ),
    ({"prompts": ["a", 7]}, "prompts[1]", "must be a text or a list of token ids"),
    ({"prompts": ["a", []]}, "prompts[1]", "must be a text or a list of token ids"),
    ({"prompts": ["a", [-1]]}, "prompts[1]", "token ids from 0"),
    ({"prompts": ["a"], "top_p": 2}, "top_p", "prompts[0]: top_p"),
    ({"prompts": ["a"], "max_concurrency": 0}, "max_concurrency", "max_concurrency"),
    ({"prompts": ["a"], "metadata": {"a": 1}}, "metadata.a", "metadata"),
    ({"prompts": ["a"], "expires_after_s": -1}, "expires_after_s", "expires_after_s"),
    ([1], None, "the body: Expected `object`"),
]


def test_what_is_wrong_is_named_and_nothing_is_stored(folder: Path) -> None:
    async def test(client: Client) -> None:
        for body, param, told in WRONG:
            error = (await client.post(body, status=400))["error"]
            assert error["param"] == param and told in error["message"], error
            assert error["type"] == "invalid_request_error"
        assert (await client.http.get("/v1/jobs")).json()["data"] == []

    serve(folder, test, jobs_max_requests=3)


def test_lines_that_are_wrong_are_named(folder: Path) -> None:
    async def test(client: Client) -> None:
        good = json.dumps({"url": "/v1/completions", "body": completion()["body"]}).encode()
        for bad, told in (
            (b"{", "line 3 is not valid JSON"),
            (b'{"url": 5, "body": {}}', "line 3: url: Input should be"),
        ):
            body = good + b"\n\n" + bad
            error = (await client.post(body, status=400, headers={"Content-Type": "application/x-ndjson"}))["error"]
            assert told in error["message"] and error["param"].startswith("requests[1]")
        error = (await client.post(b"\n", status=400, headers={"Content-Type": "application/jsonl"}))["error"]
        assert error["param"] == "requests"
        await client.post(b"{", status=400, headers={"Content-Type": "application/json"})
        await client.post(b"{}", status=415, headers={"Content-Type": "text/plain"})

    serve(folder, test)


DEEP = b"[" * 100_000 + b"]" * 100_000
MALFORMED = [
    *(b"", b"{", b"null", DEEP, b'{"prompts":["a"],"x":%b}' % DEEP, b'{"prompts":%b}' % DEEP),
    b'{"requests":[{"endpoint":"/v1/completions","body":{"prompt":"a","x":%b}}]}' % DEEP,
    *(b'{"prompts":["\xff"]}', b'{"prompts":["a"],"x":"\xff"}', b'{"\xff":1,"prompts":["a"]}'),
    *(b'{"prompts":["\\ud800"]}', b'{"prompts":["a"],"x":NaN}', b'{"prompts":["a"],"x":1e999}'),
]


def test_malformed_bodies_are_refused(folder: Path) -> None:
    async def test(client: Client) -> None:
        for body in MALFORMED:
            for kind in ("application/json", "application/jsonl"):
                error = (await client.post(body, status=400, headers={"Content-Type": kind}))["error"]
                assert error["type"] == "invalid_request_error" and len(error["message"]) < 300

    serve(folder, test)


def test_an_unknown_model_is_named_with_its_index(folder: Path) -> None:
    async def test(client: Client) -> None:
        error = (await client.post({"requests": [completion(model="other")]}, status=404))["error"]
        assert error["param"] == "requests[0].body.model" and error["code"] == "model_not_found"

    serve(folder, test)


def test_fields_without_an_effect_are_told(folder: Path) -> None:
    async def test(client: Client) -> None:
        body = {"requests": [completion(colour="red"), {**completion(), "shape": 1}], "size": 2}
        answer = await client.http.post("/v1/jobs", json=body)
        assert answer.status_code == 202 and answer.headers["location"] == f"/v1/jobs/{answer.json()['id']}"
        assert sorted(answer.headers["x-sash-ignored"].split(", ")) == ["colour", "shape", "size"]

    serve(folder, test)


def test_a_request_that_the_engine_refuses_is_a_failed_result(folder: Path) -> None:
    async def test(client: Client) -> None:
        client.engine.refuse = "the prompt has 900 tokens, at most 512"
        job = await client.ended(await client.post({"prompts": ["a", "b"]}))
        assert job["counts"] == {"total": 2, "completed": 0, "failed": 2, "remaining": 0}
        response = (await client.results(job))[0]["response"]
        assert response["status_code"] == 400 and "900 tokens" in response["body"]["error"]["message"]

    serve(folder, test)


def test_an_idempotency_key_finds_the_job_that_it_made(folder: Path) -> None:
    async def test(client: Client) -> None:
        key = {"headers": {"Idempotency-Key": "k-1"}}
        first = await client.post({"prompts": ["a"]}, **key)
        again = await client.post({"prompts": ["a"]}, status=200, **key)
        assert again["id"] == first["id"]
        error = (await client.post({"prompts": ["b"]}, status=409, **key))["error"]
        assert error["code"] == "idempotency_key_reused" and first["id"] in error["message"]
        same_time = await asyncio.gather(
            *(
                client.http.post("/v1/jobs", json={"prompts": ["c"]}, headers={"Idempotency-Key": "k-2"})
                for _ in range(5)
            )
        )
        assert len({answer.json()["id"] for answer in same_time}) == 1
        assert sorted(answer.status_code for answer in same_time) == [200] * 4 + [202]
        error = (await client.post({"prompts": ["b"]}, status=400, headers={"Idempotency-Key": "a b"}))["error"]
        assert error["param"] == "Idempotency-Key"

    serve(folder, test)


def test_an_idempotency_key_finds_its_job_after_a_restart_with_another_model(folder: Path) -> None:
    ids: list[str] = []

    async def first(client: Client) -> None:
        ids.append((await client.post({"requests": [completion()]}, headers={"Idempotency-Key": "k"}))["id"])

    async def second(client: Client) -> None:
        again = await client.post({"requests": [completion()]}, status=200, headers={"Idempotency-Key": "k"})
        assert again["id"] == ids[0]

    serve(folder, first)
    serve(folder, second, model_name="another")
