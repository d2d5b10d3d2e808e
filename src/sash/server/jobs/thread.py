"""The store's thread: all work on its file, one operation after the other, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Concatenate, ParamSpec, TypeVar

from sash.server.jobs.store import JobStore

P = ParamSpec("P")
T = TypeVar("T")


class StoreThread:
    """A ``JobStore`` that belongs to a thread of its own: ``await thread.call(JobStore.get, job_id)``."""

    def __init__(self, opened: Callable[[], JobStore]) -> None:
        self._opened = opened
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="sash-jobs")
        self._store: JobStore | None = None

    async def start(self) -> None:
        """Open the store. Raises what opening it raises."""

        def open_store() -> None:
            self._store = self._opened()

        try:
            await self._run(open_store)
        except BaseException:
            self._executor.shutdown(wait=False)
            raise

    async def call(self, operation: Callable[Concatenate[JobStore, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """An operation of the store. Raises what it raises; whoever stops waiting doesn't stop the operation."""
        assert self._store is not None, "start() comes first"
        store = self._store
        return await self._run(lambda: operation(store, *args, **kwargs))

    async def close(self) -> None:
        """Close the store after what was asked for before."""
        if self._store is not None:
            await self.call(JobStore.close)
            self._store = None
        self._executor.shutdown(wait=False)

    async def _run(self, work: Callable[[], T]) -> T:
        # Shielded: cancelling would take back what waits in the thread's queue.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._executor, work))
