"""Watches a server's /stats while something else asks it."""

from __future__ import annotations

import asyncio
import threading
import time
from types import TracebackType
from typing import Any

from sash.bench.serving.client import Address, ClientError, fetch


class Sampler:
    """Samples pools and queues every ``every_s`` seconds inside a with block; ``rows`` are what it saw."""

    def __init__(self, address: Address, every_s: float = 0.5) -> None:
        self._address = address
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.rows: list[dict[str, Any]] = []

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        started = time.monotonic()
        while not self._stop.is_set():
            try:
                stats = asyncio.run(fetch(self._address, "/stats"))
            except ClientError:
                stats = None
            if stats and stats.get("engine"):
                self.rows.append(row_of(stats, time.monotonic() - started))
            self._stop.wait(self._every_s)


def row_of(stats: dict[str, Any], at_s: float) -> dict[str, Any]:
    """What a plot needs of one answer of /stats: seconds, running and waiting, held and cached pages of each pool."""
    engine = stats["engine"]
    return {
        "at_s": round(at_s, 3),
        "running": engine["running"],
        "waiting": engine["waiting"],
        "pools": {
            pool["name"]: {"total": pool["num_pages"], "held": pool["held_pages"], "cached": pool["cached_pages"]}
            for pool in engine["pools"]
        },
    }
