"""Which requests run, how many, and when."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from tests.server.jobs.scene import Scene, echo, play

from sash.server.jobs.records import Finished, NewJob, NewRequest
from sash.server.jobs.store import JobStore
from sash.server.jobs.thread import StoreThread


def test_every_request_runs_once_and_the_job_completes(folder: Path) -> None:
    async def test(scene: Scene) -> None:
        scene.by_itself = echo
        job_id = await scene.add(25)
        job = await scene.state(job_id, "completed")
        assert (job.completed, job.failed) == (25, 0) and job.started_at is not None
        assert sorted(scene.order) == [(job_id, i) for i in range(25)]
        assert await scene.bodies(job_id) == {i: (200, b'"%d"' % i) for i in range(25)}
        await scene.until(lambda: not scene.runner._active)

    play(folder, test)


def test_no_more_run_than_fit(folder: Path) -> None:
    async def test(scene: Scene) -> None:
        first, second = await scene.add(10, answers=2), await scene.add(10)
        await scene.until(lambda: len(scene.running) >= 3)
        await asyncio.sleep(0.05)
        # Jobs take turns: 2 + 1 + 2 answers are five, one more of two would be too many.
        assert sorted(scene.running) == sorted([(first, 0), (second, 0), (first, 1)])
        assert scene.runner.num_running == 3
        scene.running[second, 0].set_result((200, b""))
        await scene.until(lambda: (second, 1) in scene.running)
        assert len(scene.running) == 3

    play(folder, test, seats=5)


def test_a_job_runs_as_many_at_a_time_as_it_wants(folder: Path) -> None:
    async def test(scene: Scene) -> None:
        job_id = await scene.add(5, max_concurrency=2)
        other = await scene.add(1)
        await scene.until(lambda: (other, 0) in scene.running)
        await asyncio.sleep(0.05)
        assert sorted(scene.running) == sorted([(job_id, 0), (job_id, 1), (other, 0)])

    play(folder, test)


def test_jobs_take_turns(folder: Path) -> None:
    async def test(scene: Scene) -> None:
        scene.seats = 0
        large, small = await scene.add(50), await scene.add(3)
        scene.by_itself = echo
        scene.seats = 1
        await scene.state(small, "completed")
        assert scene.order[:6] == [(large, 0), (small, 0), (large, 1), (small, 1), (large, 2), (small, 2)]
        await scene.state(large, "completed")

    play(folder, test)


def test_cancelling_stops_what_runs_and_keeps_what_has_ended(folder: Path) -> None:
    async def test(scene: Scene) -> None:
        job_id, other = await scene.add(3), await scene.add(1)
        await scene.until(lambda: len(scene.running) == 4)
        scene.running[job_id, 1].set_result((200, b"{}"))
        await scene.until(lambda: len(scene.running) == 3)
        await scene.thread.call(JobStore.request_cancel, job_id)
        assert scene.runner.stop_job(job_id)
        job = await scene.state(job_id, "cancelled")
        assert job.completed == 1 and list(scene.running) == [(other, 0)]
        assert not scene.runner.stop_job(job_id)
        scene.running[other, 0].set_result((200, b"{}"))
        await scene.state(other, "completed")

    play(folder, test)


def test_a_job_whose_time_is_over_expires_while_it_runs(folder: Path) -> None:
    now = [1000.0]

    async def test(scene: Scene) -> None:
        job_id = await scene.add(2, expires_after_s=60.0)
        await scene.until(lambda: len(scene.running) == 2)
        scene.running[job_id, 0].set_result((200, b"{}"))
        while (await scene.job(job_id)).completed < 1:
            await asyncio.sleep(0.001)
        now[0] += 61
        job = await scene.state(job_id, "expired")
        await scene.until(lambda: not scene.running)
        assert (job.completed, job.total) == (1, 2)
        now[0] += 1001
        async with asyncio.timeout(20):
            while await scene.thread.call(JobStore.get, job_id) is not None:
                await asyncio.sleep(0.001)

    play(folder, test, clock=lambda: now[0])


def test_a_stop_in_the_middle_goes_on_after_the_next_start(folder: Path) -> None:
    ran: list[tuple[str, int]] = []
    job_ids: list[str] = []

    async def first(scene: Scene) -> None:
        job_ids.append(await scene.add(6))
        await scene.until(lambda: len(scene.running) == 3)
        for i in (0, 2):
            scene.running[job_ids[0], i].set_result((200, b'"first"'))
            await scene.until(lambda: (job_ids[0], i) not in scene.running)  # noqa: B023  # waited for here
        # The server ends at once: what has ended is stored all the same.

    async def second(scene: Scene) -> None:
        scene.by_itself = echo
        job = await scene.state(job_ids[0], "completed")
        assert job.completed == 6
        ran.extend(scene.order)
        bodies = await scene.bodies(job.id)
        assert {i for i, (_, body) in bodies.items() if body == b'"first"'} == {0, 2}

    play(folder, first, seats=3)
    play(folder, second)
    assert sorted(ran) == [(job_ids[0], i) for i in (1, 3, 4, 5)]


def test_a_job_of_another_model_waits(folder: Path) -> None:
    async def test(scene: Scene) -> None:
        scene.by_itself = echo
        waits, runs = await scene.add(models=("other",)), await scene.add(models=("m",))
        await scene.state(runs, "completed")
        assert (await scene.job(waits)).state == "queued"
        assert not scene.runner.serves(await scene.job(waits))
        assert not scene.runner.stop_job(waits)

    play(folder, test)


def test_a_cancel_that_a_crash_cut_off_is_completed(folder: Path) -> None:
    store = JobStore(folder)
    job, _ = store.create(NewJob([NewRequest("/v1/completions", b"{}")], models=("other",)))
    store.request_cancel(job.id)
    store.close()

    async def test(scene: Scene) -> None:
        await scene.state(job.id, "cancelled")
        assert not scene.order

    play(folder, test)


def test_results_that_end_together_are_one_transaction(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = JobStore.finish

    def counted(store: JobStore, results: list[Finished]) -> None:
        sizes.append(len(results))
        real(store, results)

    monkeypatch.setattr(JobStore, "finish", counted)

    async def test(scene: Scene) -> None:
        job_id = await scene.add(20)
        await scene.until(lambda: len(scene.running) == 20)
        for future in list(scene.running.values()):
            future.set_result((200, b"{}"))
        await scene.state(job_id, "completed")

    play(folder, test)
    assert sizes == [20]


def test_a_store_that_cant_be_opened_says_so(folder: Path) -> None:
    async def test() -> None:
        def broken() -> JobStore:
            raise ValueError("broken")

        thread = StoreThread(broken)
        with pytest.raises(ValueError, match="broken"):
            await thread.start()

    asyncio.run(test())


def test_whoever_stops_waiting_does_not_stop_the_store(folder: Path) -> None:
    async def test() -> None:
        thread = StoreThread(lambda: JobStore(folder))
        await thread.start()
        goes_on = threading.Event()
        first = asyncio.create_task(thread.call(lambda store: goes_on.wait(20)))
        new = NewJob([NewRequest("/v1/completions", b"{}")])
        second = asyncio.create_task(thread.call(JobStore.create, new))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([second])
        goes_on.set()
        assert await first
        assert len(await thread.call(JobStore.jobs)) == 1
        await thread.close()

    asyncio.run(test())
