"""Turns: one thread at a time in an engine, and none when the interpreter ends."""

from __future__ import annotations

import atexit
import threading
from weakref import WeakSet

_open: WeakSet[Turns] = WeakSet()


class Turns:
    """A lock of one engine, to be held from a step's schedule to the delivery of its news.

    The interpreter's end takes it for good: a thread of the C++ kernels or of torch that came back from a step to an
    interpreter that is gone would abort the process. So a step that runs is waited for, and no further one begins.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _open.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def close(self) -> None:
        """Wait for whoever has the turn, and give it to nobody else."""
        self._lock.acquire()


@atexit.register
def _close_all() -> None:
    for turns in list(_open):
        turns.close()
