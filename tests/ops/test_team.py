"""The kernels' threads: callers at the same time, and children that a process forks."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sash.ops import native, native_linear, packed

MODULE, NOTE = native.load()
TASKS = Path("/proc/self/task")
pytestmark = [
    pytest.mark.skipif(MODULE is None, reason=NOTE),
    # Python warns of what is tested here.
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def head(outputs: int) -> native_linear.Described:
    return native_linear.describe(packed.pack(random(outputs, 64, seed=1), "int8"))


def at_once(*calls: Callable[[], None]) -> None:
    """Run the calls in threads of their own; raises what one of them raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], None]) -> None:
        try:
            start.wait()
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_two_threads_that_search_at_once_do_not_share_memory() -> None:
    """One of them asks for more rows each time, for which the buffers must grow."""
    assert MODULE is not None
    weight, x = head(5000), random(40, 64, seed=2)

    def best(search: Any, rows: int) -> Any:
        return search.best(x.data_ptr(), x.stride(0), rows, 2)

    wanted = [best(MODULE.Search(weight.native, 2), rows) for rows in range(len(x) + 1)]
    for _ in range(5):
        search = MODULE.Search(weight.native, 2)

        def few(search: Any = search) -> None:
            assert all(best(search, 1) == wanted[1] for _ in range(100))

        def more(search: Any = search) -> None:
            for rows in range(2, len(x) + 1):
                assert best(search, rows) == wanted[rows]

        at_once(few, more)


# ---------------------------------------------------------------- fork


class Child:
    """A product, and a check of it that runs in a forked child; torch's own threads are not used there."""

    def __init__(self) -> None:
        self.weight, self.x = head(1000), random(9, 64, seed=3)
        self.room = torch.empty(9, 1024)
        self.wanted = native_linear.product(self.x, self.weight).clone()

    def product(self) -> torch.Tensor:
        return native_linear.product(self.x, self.weight, self.room)

    def check(self) -> None:
        self.room.fill_(0)
        threads = len(list(TASKS.iterdir())) if TASKS.is_dir() else 0
        for _ in range(3):
            assert torch.equal(self.product(), self.wanted)
        if threads:
            assert len(list(TASKS.iterdir())) == threads + 1, "a child has a helper of its own, and no more"

    def run(self) -> None:
        process = multiprocessing.get_context("fork").Process(target=self.check)
        process.start()
        process.join(60)
        stuck = process.is_alive()
        if stuck:
            process.kill()
            process.join()
        assert not stuck and process.exitcode == 0


@forks
def test_a_child_makes_helpers_of_its_own() -> None:
    """And the parent keeps its: both go on."""
    child = Child()
    for _ in range(3):
        child.run()
        assert torch.equal(child.product(), child.wanted)


@forks
def test_a_fork_while_another_thread_is_at_work() -> None:
    child, done = Child(), threading.Event()
    weight, x, room = head(20_000), random(9, 64, seed=4), torch.empty(9, 20_032)

    def work() -> None:
        while not done.is_set():
            native_linear.product(x, weight, room)

    def fork() -> None:
        try:
            for _ in range(5):
                child.run()
        finally:
            done.set()

    at_once(work, fork)


@forks
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system pins no threads")
def test_a_child_keeps_to_the_processors_that_were_pinned() -> None:
    assert MODULE is not None
    processors = sorted(os.sched_getaffinity(0))
    child = Child()
    try:
        MODULE.pin(processors[-1:])
        child.product()

        class Pinned(Child):
            def check(self) -> None:
                super().check()
                for task in TASKS.iterdir():
                    assert os.sched_getaffinity(int(task.name)) == set(processors[-1:])

        Pinned().run()
    finally:
        MODULE.pin([])
        child.product()
    assert sorted(os.sched_getaffinity(0)) == processors
