"""Jobs as clients see them."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.server.apps import fake_engine
from tests.server.jobs.client import Client, Json, serve

from sash.engine.messages import Ready
from sash.server.app import create_app
from sash.server.jobs.database import default_jobs_dir
from sash.server.settings import ServerSettings


def test_jobs_are_listed_in_pages(folder: Path) -> None:
    async def test(client: Client) -> None:
        ids = [(await client.post({"prompts": ["a"]}))["id"] for _ in range(3)][::-1]
        first = (await client.http.get("/v1/jobs", params={"limit": 2})).json()
        assert [job["id"] for job in first["data"]] == ids[:2]
        assert (first["first_id"], first["last_id"], first["has_more"]) == (ids[0], ids[1], True)
        rest = (await client.http.get("/v1/jobs", params={"after": first["last_id"]})).json()
        assert [job["id"] for job in rest["data"]] == ids[2:] and not rest["has_more"]
        assert (await client.http.get("/v1/jobs", params={"after": "job_none"})).status_code == 404
        assert (await client.http.get("/v1/jobs", params={"limit": 0})).status_code == 400

    serve(folder, test)


def test_jobs_are_counted_by_state(folder: Path) -> None:
    async def test(client: Client) -> None:
        for _ in range(3):
            await client.ended(await client.post({"prompts": ["a"]}))
        stats = (await client.http.get("/stats")).json()["jobs"]
        assert stats["completed"] == 3 and sum(stats.values()) == 3 and "queued" in stats
        text = (await client.http.get("/metrics")).text
        assert re.search(r'^sash:jobs\{[^}]*state="completed"[^}]*\} 3\.0$', text, re.M)

    serve(folder, test)


def test_results_can_be_read_while_the_job_runs(folder: Path) -> None:
    async def test(client: Client) -> None:
        job = await client.post({"prompts": [f"p{i}" for i in range(20)], "max_tokens": 3, "max_concurrency": 2})
        seen: list[int] = []
        after = -1
        while len(seen) < 20:
            for line in await client.results(job, order="finished", after=after):
                seen.append(line["index"])
                after = line["sequence"]
            await asyncio.sleep(0.002)
        assert sorted(seen) == list(range(20))
        assert [line["index"] for line in await client.results(job, after=4, limit=3)] == [5, 6, 7]
        assert await client.results(job, after=19) == []

    serve(folder, test, fake_engine(delay_s=0.002))


def test_cancelling_and_deleting(folder: Path) -> None:
    async def test(client: Client) -> None:
        job = await client.post({"prompts": [f"p{i}" for i in range(10)], "max_tokens": 400, "max_concurrency": 1})
        while not client.engine.params:
            await asyncio.sleep(0.001)
        assert (await client.http.delete(f"/v1/jobs/{job['id']}")).status_code == 409
        answer = await client.http.post(f"/v1/jobs/{job['id']}/cancel")
        assert answer.status_code == 200 and answer.json()["status"] in ("cancelling", "cancelled")
        ended = await client.ended(job, "cancelled")
        assert client.engine.num_open == 0 and len(client.engine.params) == 1
        lines = await client.results(job)
        assert len(lines) == 10 and all(line["response"] is None for line in lines)
        assert lines[0]["error"] == {
            "code": "job_cancelled",
            "message": "the job was cancelled before this request had run",
        }
        assert (await client.http.post(f"/v1/jobs/{job['id']}/cancel")).json() == ended
        deleted = await client.http.delete(f"/v1/jobs/{job['id']}")
        assert deleted.json() == {"id": job["id"], "object": "job", "deleted": True}
        for method, path in (("GET", ""), ("GET", "/results"), ("POST", "/cancel"), ("DELETE", "")):
            answer = await client.http.request(method, f"/v1/jobs/{job['id']}{path}")
            assert answer.status_code == 404 and answer.json()["error"]["code"] == "job_not_found"

    serve(folder, test, fake_engine(delay_s=0.001))


def test_a_job_that_waits_for_its_model_says_so_and_can_be_cancelled(folder: Path) -> None:
    ids: list[str] = []

    async def second(client: Client) -> None:
        job = await client.job(ids[0])
        assert job["status"] == "queued" and job["waiting_for"] == "tiny"
        cancelled = (await client.http.post(f"/v1/jobs/{ids[0]}/cancel")).json()
        assert cancelled["status"] == "cancelled" and cancelled["waiting_for"] is None

    async def posted(client: Client) -> None:
        client.engine.alive = False
        ids.append((await client.post({"prompts": ["a"]}))["id"])
        await asyncio.sleep(0.03)
        assert (await client.job(ids[0]))["status"] == "queued"

    serve(folder, posted)
    serve(folder, second, model_name="another")


def test_jobs_wait_for_interactive_requests_and_leave_them_a_seat(folder: Path) -> None:
    async def test(client: Client) -> None:
        engine = client.engine
        async with engine.submit([1], params_of(400)), engine.submit([1], params_of(400)):
            job = await client.post({"prompts": [f"p{i}" for i in range(6)], "max_tokens": 400})
            while len(engine.params) < 3:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
            assert engine.num_open == 3, "two clients and one job request on four seats, one seat stays free"
            async with engine.submit([1], params_of(400)):
                pass
        while engine.num_open < 3:
            await asyncio.sleep(0.001)
        await client.http.post(f"/v1/jobs/{job['id']}/cancel")
        await client.ended(job, "cancelled")

    serve(folder, test, fake_engine(delay_s=0.001))


def params_of(max_tokens: int) -> Any:
    from sash.spec.sampling import SamplingParams

    return SamplingParams(max_tokens=max_tokens)


def test_a_drain_takes_nothing_more_and_the_next_start_goes_on(folder: Path) -> None:
    left: list[Json] = []

    async def first(client: Client) -> None:
        job = await client.post({"prompts": [f"p{i}" for i in range(12)], "max_tokens": 5})
        while not (await client.job(job["id"]))["counts"]["completed"]:
            await asyncio.sleep(0.001)
        client.state.draining = True
        while client.engine.num_open:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert client.engine.num_open == 0
        assert (await client.http.post("/v1/jobs", json={"prompts": ["a"]})).status_code == 503
        left.append(await client.job(job["id"]))

    async def second(client: Client) -> None:
        job = await client.ended(left[0])
        done = left[0]["counts"]["completed"]
        assert 0 < done < 12 and len(client.engine.params) == 12 - done
        assert [line["response"]["status_code"] for line in await client.results(job)] == [200] * 12

    serve(folder, first, fake_engine(delay_s=0.002))
    serve(folder, second)


def test_an_engine_that_dies_is_waited_for(folder: Path) -> None:
    async def test(client: Client) -> None:
        engine = client.engine
        engine.die_after = 1
        job = await client.post({"prompts": ["a", "b", "c"], "max_tokens": 3})
        while not engine.params:
            await asyncio.sleep(0.001)
        engine.alive, engine.die_after = False, None
        await asyncio.sleep(0.05)
        count = len(engine.params)
        await asyncio.sleep(0.05)
        assert len(engine.params) == count, "nothing is tried while it is dead"
        engine.alive = True
        assert (await client.ended(job))["counts"]["completed"] == 3

    serve(folder, test)


def test_an_engine_that_has_not_loaded_is_waited_for(folder: Path) -> None:
    async def test(client: Client) -> None:
        engine = client.engine
        job = await client.post({"prompts": ["a"]})
        await asyncio.sleep(0.03)
        assert (await client.job(job["id"]))["status"] == "queued"
        engine.alive, engine.info = True, Ready(512, 1, "float32", "none", "pools")
        await client.ended(job)

    serve(folder, test, fake_engine(alive=False, info=None))


def test_a_full_store_refuses_and_tells_the_way_out(folder: Path) -> None:
    async def test(client: Client) -> None:
        error = (await client.post({"prompts": ["x" * 1000] * 400}, status=507))["error"]
        assert error["code"] == "jobs_store_full" and "DELETE" in error["message"]
        job = await client.ended(await client.post({"prompts": ["a"]}))
        await client.http.delete(f"/v1/jobs/{job['id']}")

    serve(folder, test, jobs_max_bytes=200_000)


def test_so_many_jobs_and_no_more(folder: Path) -> None:
    async def test(client: Client) -> None:
        job = await client.ended(await client.post({"prompts": ["a"]}))
        error = (await client.post({"prompts": ["a"]}, status=429))["error"]
        assert error["code"] == "too_many_jobs"
        await client.http.delete(f"/v1/jobs/{job['id']}")
        await client.post({"prompts": ["a"]})

    serve(folder, test, jobs_max_stored=1)


def test_a_job_that_is_deleted_while_it_is_read_ends_the_lines_with_an_error(folder: Path) -> None:
    async def test(client: Client) -> None:
        job = await client.ended(await client.post({"prompts": ["a"]}))
        assert client.state.jobs is not None
        pieces = client.state.jobs.results(job["id"], "input", -1, None)
        await anext(pieces)
        await client.http.delete(f"/v1/jobs/{job['id']}")
        with pytest.raises(Exception, match="was deleted"):
            await anext(pieces)

    serve(folder, test)


def test_without_a_folder_there_are_no_jobs() -> None:
    async def test(client: Client) -> None:
        for method, path in (("POST", ""), ("GET", ""), ("GET", "/job_1")):
            answer = await client.http.request(method, f"/v1/jobs{path}", **({"json": {}} if method == "POST" else {}))
            assert answer.status_code == 404 and "--jobs-dir" in answer.json()["error"]["message"]

    serve(None, test)


def test_the_users_folder_for_state() -> None:
    assert default_jobs_dir({"XDG_STATE_HOME": "/state"}) == Path("/state/sash/jobs")
    home = Path.home() / ".local" / "state" / "sash" / "jobs"
    assert default_jobs_dir({}) == home and default_jobs_dir({"XDG_STATE_HOME": "relative"}) == home


def test_the_description_is_whole(folder: Path) -> None:
    app = create_app(fake_engine(), ServerSettings(model_name="tiny"))
    described = json.dumps(app.openapi())
    paths = app.openapi()["paths"]
    assert {"get", "post"} == paths["/v1/jobs"].keys() and {"get", "delete"} == paths["/v1/jobs/{job_id}"].keys()
    schema = paths["/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"]["requests"]["anyOf"][0]["items"]["properties"]["endpoint"]["enum"]
    assert "#/$defs" not in described
