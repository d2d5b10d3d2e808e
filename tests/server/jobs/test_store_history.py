"""Any history of operations, with the process killed between and within them: nothing lost, nothing twice."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from tests.server.jobs.memory import MEMORY

from sash.server.jobs.database import FILE_NAME
from sash.server.jobs.records import Finished, NewJob, NewRequest
from sash.server.jobs.store import JobStore

OPEN = ("queued", "running", "cancelling")
LIFE_S = 50.0
KEEP_S = 30.0


@dataclass
class Expected:
    """What the store should hold of one job."""

    total: int
    expires_at: float
    state: str = "queued"
    ended_at: float = 0.0
    results: dict[int, tuple[int, bytes]] = field(default_factory=dict)

    def end(self, state: str, now: float) -> None:
        self.state, self.ended_at = state, now


Model = dict[str, Expected]
Content = dict[str, tuple[str, int, dict[int, tuple[int, bytes]]]]


def content(store: JobStore) -> Content:
    """All that a store holds, as its readers see it."""
    out: Content = {}
    for job in store.jobs(limit=1000):
        results: dict[int, tuple[int, bytes]] = {}
        after = -1
        while piece := store.results(job.id, order="finished", after=after)[1]:
            for result in piece:
                assert result.sequence is not None and result.status is not None and result.body is not None
                assert result.index not in results, "a result came twice"
                results[result.index] = (result.status, result.body)
                after = result.sequence
        out[job.id] = (job.state, job.total, results)
    return out


def copy_files(source: Path, target: Path) -> None:
    """What a killed process leaves: the file and its log, at this moment."""
    target.mkdir()
    for name in (FILE_NAME, f"{FILE_NAME}-wal"):
        if (source / name).exists():
            shutil.copy(source / name, target / name)


class Histories(RuleBasedStateMachine):
    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="sash-jobs-", dir=MEMORY))
        self.folders = 0
        self.now = 1000.0
        self.model: Model = {}
        self.keys: dict[str, str] = {}
        self.store = self.opened()

    def opened(self) -> JobStore:
        folder = self.root / str(self.folders)
        return JobStore(folder, clock=lambda: self.now)

    def do(self, operation: Callable[[], object], change: Callable[[Model], object], kill_at: int | None) -> None:
        """Run an operation; with ``kill_at`` the process is killed before that statement of it, and what is on disk is
        opened again."""
        before = deepcopy(self.model)
        current, following = self.root / str(self.folders), self.root / str(self.folders + 1)
        statements = 0

        def watch(_: str) -> None:
            nonlocal statements
            if statements == kill_at:
                copy_files(current, following)
            statements += 1

        self.store._db.set_trace_callback(watch)
        operation()
        self.store._db.set_trace_callback(None)
        change(self.model)
        if following.exists():
            self.store.close()
            self.folders += 1
            self.store = self.opened()
            if content(self.store) != expected(self.model):
                self.model = before

    @rule(target=jobs, total=st.integers(1, 4), key=st.sampled_from([None, "a", "b"]))
    def create(self, total: int, key: str | None) -> object:
        if key is not None and self.keys.get(key) in self.model:
            job, made = self.store.create(self.new(total, key, self.model[self.keys[key]].total))
            assert (job.id, made) == (self.keys[key], False)
            return multiple()
        job, made = self.store.create(self.new(total, key, total))
        assert made
        self.model[job.id] = Expected(total, self.now + LIFE_S)
        if key is not None:
            self.keys[key] = job.id
        return job.id

    def new(self, total: int, key: str | None, fingerprint: int) -> NewJob:
        requests = [NewRequest("/v1/completions", b"{%d}" % i, f"c{i}") for i in range(total)]
        return NewJob(requests, expires_after_s=LIFE_S, idempotency_key=key, fingerprint=b"%d" % fingerprint)

    @rule(total=st.integers(1, 4), kill_at=st.integers(0, 6))
    def killed_while_creating(self, total: int, kill_at: int) -> None:
        known = set(self.model)
        self.do(lambda: self.store.create(self.new(total, None, 0)), lambda model: None, kill_at)
        for job_id, (_, stored, _) in content(self.store).items():
            if job_id not in known:
                assert stored == total
                self.model[job_id] = Expected(total, self.now + LIFE_S)

    @rule(job=jobs, kill_at=st.none() | st.integers(0, 3))
    def start(self, job: str, kill_at: int | None) -> None:
        def change(model: Model) -> None:
            if job in model and model[job].state == "queued":
                model[job].state = "running"

        self.do(lambda: self.store.start(job), change, kill_at)

    @rule(
        parts=st.lists(st.tuples(jobs, st.integers(0, 3), st.sampled_from([200, 400, 500])), min_size=1, max_size=5),
        kill_at=st.none() | st.integers(0, 16),
    )
    def finish(self, parts: list[tuple[str, int, int]], kill_at: int | None) -> None:
        results = [
            Finished(job, index, status, b"%d %d" % (index, self.folders))
            for job, index, status in parts
            if job not in self.model or index < self.model[job].total
        ]

        def change(model: Model) -> None:
            for result in results:
                job = model.get(result.job_id)
                if job is None or job.state not in OPEN:
                    continue
                job.results.setdefault(result.index, (result.status, result.body))
                if len(job.results) == job.total:
                    job.end("completed", self.now)

        self.do(lambda: self.store.finish(results), change, kill_at)

    @rule(job=jobs)
    def finish_again(self, job: str) -> None:
        if job in self.model:
            index = min(self.model[job].results, default=0)
            again = [Finished(job, index, 418, b"again")] * 2
            change = again[0].status, again[0].body
            self.store.finish(again)
            if self.model[job].state in OPEN:
                self.model[job].results.setdefault(index, change)
                if len(self.model[job].results) == self.model[job].total:
                    self.model[job].end("completed", self.now)

    @rule(job=jobs, kill_at=st.none() | st.integers(0, 3))
    def request_cancel(self, job: str, kill_at: int | None) -> None:
        def change(model: Model) -> None:
            if job in model and model[job].state in ("queued", "running"):
                model[job].state = "cancelling"

        self.do(lambda: self.store.request_cancel(job), change, kill_at)

    @rule(job=jobs, kill_at=st.none() | st.integers(0, 3))
    def cancelled(self, job: str, kill_at: int | None) -> None:
        def change(model: Model) -> None:
            if job in model and model[job].state == "cancelling":
                model[job].end("cancelled", self.now)

        self.do(lambda: self.store.cancelled(job), change, kill_at)

    @rule(job=jobs, kill_at=st.none() | st.integers(0, 3))
    def fail(self, job: str, kill_at: int | None) -> None:
        def change(model: Model) -> None:
            if job in model and model[job].state in OPEN:
                model[job].end("failed", self.now)

        self.do(lambda: self.store.fail(job, "no room"), change, kill_at)

    @rule(step=st.sampled_from([1.0, 20.0, 40.0]), kill_at=st.none() | st.integers(0, 6))
    def pass_time(self, step: float, kill_at: int | None) -> None:
        self.now += step

        def expire(model: Model) -> None:
            for job in model.values():
                if job.state in ("queued", "running") and job.expires_at <= self.now:
                    job.end("expired", self.now)

        def prune(model: Model) -> None:
            for job_id, job in list(model.items()):
                if job.state not in OPEN and job.ended_at <= self.now - KEEP_S:
                    del model[job_id]

        self.do(self.store.expire, expire, kill_at)
        self.do(lambda: self.store.prune(KEEP_S), prune, kill_at)

    @rule(job=consumes(jobs))
    def delete(self, job: str) -> None:
        if job in self.model and self.model[job].state not in OPEN:
            assert self.store.delete(job)
            del self.model[job]

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self.opened()

    @invariant()
    def agrees(self) -> None:
        assert content(self.store) == expected(self.model)
        self.store.check()
        for job_id, job in self.model.items():
            unfinished, after = [], -1
            while (pending := self.store.next_pending(job_id, after)) is not None:
                unfinished.append(pending.index)
                after = pending.index
            assert unfinished == [i for i in range(job.total) if i not in job.results]

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.root)


def expected(model: Model) -> Content:
    return {job_id: (job.state, job.total, job.results) for job_id, job in model.items()}


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=40, stateful_step_count=30)


@settings(max_examples=60)
@given(share=st.floats(0, 1))
def test_a_log_torn_anywhere_gives_a_state_that_was(share: float) -> None:
    root = Path(tempfile.mkdtemp(prefix="sash-jobs-", dir=MEMORY))
    try:
        store = JobStore(root / "a", clock=lambda: 0.0)
        job, _ = store.create(NewJob([NewRequest("/v1/completions", b"{}") for _ in range(6)]))
        store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        history = [content(store)]
        for i in range(6):
            store.finish([Finished(job.id, i, 200, b"x" * 3000)])
            history.append(content(store))
        copy_files(root / "a", root / "b")
        store.close()
        log = root / "b" / f"{FILE_NAME}-wal"
        with open(log, "r+b") as file:
            file.truncate(int(share * log.stat().st_size))
        torn = JobStore(root / "b", clock=lambda: 0.0)
        torn.check()
        assert content(torn) in history
        assert (content(torn) == history[-1]) == (share == 1.0)
        torn.close()
    finally:
        shutil.rmtree(root)
