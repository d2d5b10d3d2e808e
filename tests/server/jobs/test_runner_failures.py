"""Requests, engines and stores that fail while jobs run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.server.jobs.scene import Scene, echo, play

from sash.server.jobs import runner as module
from sash.server.jobs.records import JobStoreError, NewJob, NewRequest, Pending, StoreFullError
from sash.server.jobs.runner import NotReadyError
from sash.server.jobs.store import JobStore
from sash.spec.errors import EngineDeadError, OverloadedError


def test_a_request_that_fails_is_a_result(folder: Path) -> None:
    async def test(scene: Scene) -> None:
        async def run(pending: Pending) -> tuple[int, bytes]:
            if pending.index == 0:
                return 400, b'{"error": 1}'
            if pending.index == 1:
                raise ZeroDivisionError("a defect")
            return 200, b"{}"

        scene.by_itself = run
        job_id = await scene.add()
        job = await scene.state(job_id, "completed")
        assert (job.completed, job.failed) == (1, 2)
        bodies = await scene.bodies(job_id)
        assert bodies[0] == (400, b'{"error": 1}')
        assert bodies[1][0] == 500 and b"the server failed on this request" in (bodies[1][1] or b"")

    play(folder, test)


def test_overloaded_and_loading_engines_are_waited_for(folder: Path) -> None:
    async def test(scene: Scene) -> None:
        tries: list[int] = []

        async def run(pending: Pending) -> tuple[int, bytes]:
            tries.append(pending.index)
            if len(tries) == 1:
                raise OverloadedError("full", 0)
            if len(tries) == 2:
                raise NotReadyError(0.01)
            return 200, b"{}"

        scene.by_itself = run
        job = await scene.state(await scene.add(2), "completed")
        assert job.completed == 2 and len(tries) == 4

    play(folder, test)


def test_nothing_is_tried_until_an_overloaded_engine_wants_it(folder: Path) -> None:
    async def test(scene: Scene) -> None:
        async def run(pending: Pending) -> tuple[int, bytes]:
            raise OverloadedError("full", 60)

        scene.by_itself = run
        await scene.add(5, max_concurrency=1)
        await scene.until(lambda: len(scene.order) == 1)
        await asyncio.sleep(0.05)
        assert len(scene.order) == 1

    play(folder, test)


def test_a_request_that_kills_the_engine_is_found_and_the_others_are_answered(folder: Path) -> None:
    async def test(scene: Scene) -> None:
        deaths: list[int] = []

        async def run(pending: Pending) -> tuple[int, bytes]:
            for _ in range(5):
                await asyncio.sleep(0.001)
            # The engine dies a while after request 2 began, and takes with it whatever runs then.
            if (len(scene.running) > 1 and any(index == 2 for _, index in scene.running)) or pending.index == 2:
                deaths.append(pending.index)
                raise EngineDeadError("the engine failed")
            return 200, b"{}"

        scene.by_itself = run
        job_id = await scene.add(8)
        job = await scene.state(job_id, "completed")
        assert (job.completed, job.failed) == (7, 1)
        bodies = await scene.bodies(job_id)
        assert bodies[2][0] == 500 and b"the engine failed 3 times" in (bodies[2][1] or b"")
        assert deaths.count(2) == module.MAX_ATTEMPTS
        rows = await scene.thread.call(lambda store: store._db.execute("SELECT idx, attempts FROM requests").fetchall())
        assert rows == [(i, deaths.count(i)) for i in range(8)]
        assert all(deaths.count(i) <= 1 for i in range(8) if i != 2)

    play(folder, test)


def test_attempts_count_across_restarts_and_run_alone(folder: Path) -> None:
    store = JobStore(folder)
    job, _ = store.create(NewJob([NewRequest("/v1/completions", b"{}") for _ in range(4)]))
    for _ in range(2):
        store.count_attempt(job.id, 1)
    store.close()

    async def test(scene: Scene) -> None:
        await scene.until(lambda: bool(scene.running))
        await asyncio.sleep(0.03)
        assert list(scene.running) == [(job.id, 0)]
        scene.running[job.id, 0].set_result((200, b"{}"))
        await scene.until(lambda: (job.id, 1) in scene.running)
        await asyncio.sleep(0.03)
        assert list(scene.running) == [(job.id, 1)]
        scene.running[job.id, 1].set_exception(EngineDeadError("again"))
        await scene.until(lambda: (job.id, 3) in scene.running)
        assert (await scene.bodies(job.id))[1][0] == 500

    play(folder, test)


def test_results_that_find_no_room_fail_their_job_only(folder: Path) -> None:
    async def test(scene: Scene) -> None:
        large, small = await scene.add(3), await scene.add(3)

        async def run(pending: Pending) -> tuple[int, bytes]:
            return 200, b"x" * (400_000 if pending.job_id == large else 10)

        await scene.until(lambda: len(scene.running) == 6)
        for (job_id, index), future in list(scene.running.items()):
            future.set_result(await run(Pending(job_id, index, "", b"", 1, 0)))
        failed = await scene.state(large, "failed")
        assert failed.error is not None and "a result can't be stored" in failed.error and "no room" in failed.error
        await scene.state(small, "completed")

    play(folder, test, max_bytes=200_000)


def test_a_store_that_fails_for_a_while_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([True, False, True, True, False] + [False] * 10_000)
    real = JobStore.next_pending

    def flaky(store: JobStore, job_id: str, after: int) -> Pending | None:
        if next(failures):
            raise JobStoreError("the disk is away")
        return real(store, job_id, after)

    monkeypatch.setattr(JobStore, "next_pending", flaky)

    async def test(scene: Scene) -> None:
        scene.by_itself = echo
        job = await scene.state(await scene.add(5), "completed")
        assert job.completed == 5

    play(folder, test)


def test_a_job_whose_start_cant_be_written_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(store: JobStore, job_id: str) -> None:
        raise StoreFullError("full")

    monkeypatch.setattr(JobStore, "start", full)

    async def test(scene: Scene) -> None:
        scene.by_itself = echo
        job = await scene.state(await scene.add(5), "failed")
        assert job.error == "its state can't be stored: full" and not scene.order

    play(folder, test)
