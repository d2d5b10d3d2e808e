from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sash.server.jobs.database import APPLICATION_ID, FILE_NAME, MIGRATIONS
from sash.server.jobs.records import (
    Finished,
    Job,
    JobStoreError,
    KeyReusedError,
    NewJob,
    NewRequest,
    StoreFullError,
    TooManyJobsError,
)
from sash.server.jobs.store import JobStore
from sash.spec.errors import ConfigError


@pytest.fixture
def store(folder: Path) -> Iterator[JobStore]:
    store = JobStore(folder / "jobs")
    yield store
    store.close()


def new_job(count: int = 3, **fields: object) -> NewJob:
    requests = [NewRequest("/v1/completions", b'{"prompt": "%d"}' % i, f"id-{i}") for i in range(count)]
    return NewJob(requests, **fields)  # type: ignore[arg-type]


def stored(store: JobStore, job: Job) -> Job:
    again = store.get(job.id)
    assert again is not None
    return again


def test_a_job_is_stored_whole(store: JobStore) -> None:
    job, made = store.create(new_job(models=("m",), metadata={"who": "ä"}, max_concurrency=2, expires_after_s=60))
    assert made and job.state == "queued" and job.total == 3 and (job.completed, job.failed) == (0, 0)
    assert job.models == ("m",) and job.metadata == {"who": "ä"} and job.max_concurrency == 2
    assert job.expires_at == job.created_at + 60 and job.started_at is job.ended_at is job.error is None
    assert stored(store, job) == job
    pending = store.next_pending(job.id, 0)
    assert pending is not None
    assert (pending.index, pending.endpoint, pending.body) == (1, "/v1/completions", b'{"prompt": "1"}')


def test_jobs_are_listed_newest_first_in_pages(store: JobStore) -> None:
    ids = [store.create(new_job())[0].id for _ in range(5)]
    assert [job.id for job in store.jobs(limit=2)] == ids[:2:-1]
    assert [job.id for job in store.jobs(after=ids[3], limit=10)] == ids[2::-1]
    assert store.jobs(after="job_gone") == []
    assert [job.id for job in store.open_jobs()] == ids


def test_results_in_order_of_input_or_of_ending(store: JobStore) -> None:
    job, _ = store.create(new_job(4))
    store.start(job.id)
    store.finish([Finished(job.id, 2, 200, b"two")])
    store.finish([Finished(job.id, 0, 400, b"zero"), Finished(job.id, 1, 200, b"one")])
    assert [(r.index, r.body) for r in store.results(job.id)[1]] == [(0, b"zero"), (1, b"one"), (2, b"two")]
    assert [r.index for r in store.results(job.id, after=1)[1]] == [2]
    finished = store.results(job.id, order="finished")[1]
    assert [r.index for r in finished] == [2, 0, 1]
    assert finished[0].sequence is not None
    assert [r.index for r in store.results(job.id, order="finished", after=finished[0].sequence)[1]] == [0, 1]
    assert finished[0].custom_id == "id-2"
    now = stored(store, job)
    assert (now.state, now.completed, now.failed) == ("running", 2, 1)
    # Once it has ended there is a line for each request, in the order of the input.
    store.request_cancel(job.id)
    store.cancelled(job.id)
    assert [(r.index, r.status) for r in store.results(job.id)[1]] == [(0, 400), (1, 200), (2, 200), (3, None)]
    assert len(store.results(job.id, order="finished")[1]) == 3


def test_large_results_come_in_pieces(store: JobStore) -> None:
    job, _ = store.create(new_job(5))
    store.finish([Finished(job.id, i, 200, b"x" * (200 << 10)) for i in range(5)])
    seen, after, pieces = [], -1, 0
    while piece := store.results(job.id, after=after)[1]:
        seen += [r.index for r in piece]
        after = seen[-1]
        pieces += 1
    assert seen == list(range(5)) and pieces == 3


def test_the_last_result_completes_the_job(store: JobStore) -> None:
    job, _ = store.create(new_job(2))
    store.finish([Finished(job.id, i, 200, b"") for i in range(2)])
    assert stored(store, job).state == "completed" and stored(store, job).ended_at is not None
    cancelled = store.request_cancel(job.id)
    assert cancelled is not None and cancelled.state == "completed"


def test_attempts_are_kept(folder: Path) -> None:
    store = JobStore(folder)
    job, _ = store.create(new_job())
    store.count_attempt(job.id, 1)
    store.close()
    store = JobStore(folder)
    attempts = [pending.attempts for i in range(3) if (pending := store.next_pending(job.id, i - 1)) is not None]
    assert attempts == [0, 1, 0]
    store.close()


def test_one_idempotency_key_is_one_job(store: JobStore) -> None:
    first, _ = store.create(new_job(idempotency_key="k", fingerprint=b"a"))
    assert store.create(new_job(idempotency_key="k", fingerprint=b"a")) == (first, False)
    with pytest.raises(KeyReusedError, match=first.id):
        store.create(new_job(idempotency_key="k", fingerprint=b"b"))
    assert len(store.jobs()) == 1
    store.finish([Finished(first.id, i, 200, b"") for i in range(3)])
    store.delete(first.id)
    assert store.create(new_job(idempotency_key="k", fingerprint=b"b"))[1]


def test_only_ended_jobs_are_deleted(store: JobStore) -> None:
    job, _ = store.create(new_job())
    with pytest.raises(JobStoreError, match="cancel it first"):
        store.delete(job.id)
    store.request_cancel(job.id)
    store.cancelled(job.id)
    assert store.delete(job.id) and not store.delete(job.id)
    assert store.results(job.id) == (None, []) and store.get(job.id) is None


def test_so_many_jobs_and_no_more(folder: Path) -> None:
    store = JobStore(folder, max_jobs=2)
    store.create(new_job())
    store.create(new_job())
    with pytest.raises(TooManyJobsError, match="2 jobs are stored and no more may; DELETE"):
        store.create(new_job())
    store.close()


def test_a_full_store_refuses_a_job_whole(folder: Path) -> None:
    store = JobStore(folder, max_bytes=200 << 10)
    small, _ = store.create(new_job())
    with pytest.raises(StoreFullError, match=f"no room left .* free space in {folder}"):
        store.create(NewJob([NewRequest("/v1/completions", b"x" * 1000) for _ in range(1000)]))
    assert store.jobs() == [small]
    store.check()
    store.create(new_job())
    store.close()


def test_a_job_whose_results_find_no_room_fails_and_can_be_deleted(folder: Path) -> None:
    store = JobStore(folder, max_bytes=200 << 10)
    job, _ = store.create(new_job(3))
    store.finish([Finished(job.id, 0, 200, b"fits")])
    with pytest.raises(StoreFullError) as caught:
        store.finish([Finished(job.id, 1, 200, b"x" * (300 << 10))])
    store.fail(job.id, str(caught.value))
    failed = stored(store, job)
    assert failed.state == "failed" and failed.error is not None and "no room left" in failed.error
    assert [r.body for r in store.results(job.id)[1]] == [b"fits", None, None]
    assert store.delete(job.id)
    store.close()


def test_a_failure_that_cant_be_written_is_told_and_written_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = JobStore(folder)
    job, _ = store.create(new_job())
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    reason = "disk full " * 2000
    store.fail(job.id, reason)
    assert store._failed, "it should have found no room"
    assert stored(store, job).state == "failed" and stored(store, job).error == reason
    assert store.open_jobs() == [] and store.expire() == []
    store.finish([Finished(job.id, 0, 200, b"late")])
    assert stored(store, job).completed == 0
    store._db.execute("PRAGMA max_page_count = 100000")
    assert store.prune(1000) == 0
    assert not store._failed and stored(store, job).state == "failed"
    store.close()


def test_deleting_gives_the_space_back(folder: Path) -> None:
    store = JobStore(folder)
    job, _ = store.create(NewJob([NewRequest("/v1/completions", b"x" * 10_000) for _ in range(100)]))
    (before,) = store._db.execute("PRAGMA page_count").fetchone()
    store.fail(job.id, "enough")
    store.delete(job.id)
    (after,) = store._db.execute("PRAGMA page_count").fetchone()
    assert before > 250 and after < 50
    store.close()


def test_every_commit_is_on_disk(store: JobStore) -> None:
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)


def test_a_second_server_is_told_to_take_another_folder(folder: Path) -> None:
    store = JobStore(folder)
    with pytest.raises(ConfigError, match=rf"in use by another server \(process {os.getpid()}\).*--jobs-dir"):
        JobStore(folder)
    other = (
        "import sys; from pathlib import Path; from sash.server.jobs.store import JobStore; "
        "from sash.spec.errors import ConfigError\n"
        "try: JobStore(Path(sys.argv[1]))\nexcept ConfigError as error: sys.exit(f'refused: {error}')"
    )
    command = [sys.executable, "-c", other, str(folder)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1 and f"process {os.getpid()}" in refused.stderr
    store.close()
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    JobStore(folder).close()


@pytest.mark.parametrize("damage", ["no database", "header", "pages"])
def test_a_broken_file_is_named_with_the_way_out(folder: Path, damage: str) -> None:
    store = JobStore(folder)
    store.create(NewJob([NewRequest("/v1/completions", b"x" * 100) for _ in range(1000)]))
    store.close()
    path = folder / FILE_NAME
    with open(path, "r+b") as file:
        if damage == "no database":
            file.truncate()
            file.write(b"not a database at all, but long enough to be read as one" * 100)
        elif damage == "header":
            file.seek(20)
            file.write(b"\xff" * 60)
        else:
            file.seek(4096 * 4)
            file.write(b"\xa5" * 4096 * 20)
    with pytest.raises(ConfigError, match=rf"{path} is broken \(.*Move it away.*--jobs-dir"):
        JobStore(folder)
    for file in folder.glob(f"{FILE_NAME}*"):
        file.unlink()
    JobStore(folder).close()  # the lock was let go of, and the way out is one


def test_a_newer_schema_is_refused(folder: Path) -> None:
    JobStore(folder).close()
    with sqlite3.connect(folder / FILE_NAME) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
        assert db.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    db.close()
    with pytest.raises(ConfigError, match=r"newer sash \(schema 2, this one knows 1\).*--jobs-dir"):
        JobStore(folder)


def test_somebody_elses_database_is_left_alone(folder: Path) -> None:
    with sqlite3.connect(folder / FILE_NAME) as db:
        db.execute("CREATE TABLE jobs (theirs)")
    db.close()
    with pytest.raises(ConfigError, match="is not a jobs store"):
        JobStore(folder)


def test_a_folder_that_cant_be_made_is_named(folder: Path) -> None:
    (folder / "file").touch()
    with pytest.raises(ConfigError, match=r"jobs_dir: .*file.jobs.* can't be written .*--jobs-dir"):
        JobStore(folder / "file" / "jobs")


def test_a_file_that_cant_be_used_is_named(folder: Path) -> None:
    (folder / FILE_NAME).mkdir()
    with pytest.raises(ConfigError, match=r"jobs.sqlite3 can't be used .*--jobs-dir"):
        JobStore(folder)


def test_nobody_else_reads_the_folder(folder: Path) -> None:
    JobStore(folder / "jobs").close()
    assert (folder / "jobs").stat().st_mode & 0o077 == 0


def test_what_sqlite_says_is_passed_on(store: JobStore) -> None:
    job, _ = store.create(new_job())
    with pytest.raises(JobStoreError, match="FOREIGN KEY"):
        store.finish([Finished(job.id, 99, 200, b"")])
    store._db.execute("DROP TABLE results")
    with pytest.raises(JobStoreError, match="no such table"):
        store.results(job.id)
