"""Answers of /v1/responses that can be read and gone on from: in memory, the oldest give way, gone with the process."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from sash.server.items import Item
from sash.server.protocol.responses import ResponseObject

MAX_STORED = 1000
MAX_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class Stored:
    """An answer, the items that it was made of (``own`` of its request, ``earlier`` of the requests before), and the
    task that makes it where it is still being made in the background."""

    answer: ResponseObject
    own: list[Item]
    earlier: list[Item]
    task: asyncio.Task[None] | None = None
    num_bytes: int = 0

    @property
    def history(self) -> list[Item]:
        """The conversation so far, this answer included."""
        return [*self.earlier, *self.own, *map(dict, self.answer["output"])]


class ResponseStore:
    """The last answers, within a number and a size. What is being made in the background doesn't give way."""

    def __init__(self, max_stored: int = MAX_STORED, max_bytes: int = MAX_BYTES) -> None:
        self._max_stored = max_stored
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._num_bytes = 0

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._stored

    def put(self, stored: Stored) -> None:
        """Keep an answer, in place of an earlier state of it."""
        self.remove(stored.answer["id"])
        stored.num_bytes = len(msgspec.json.encode([stored.answer, stored.own, stored.earlier]))
        self._stored[stored.answer["id"]] = stored
        self._num_bytes += stored.num_bytes
        for response_id in list(self._stored):
            if len(self._stored) <= self._max_stored and self._num_bytes <= self._max_bytes:
                break
            if self._stored[response_id].task is None:
                self.remove(response_id)

    def get(self, response_id: str) -> Stored | None:
        """An answer; it is the newest now."""
        stored = self._stored.get(response_id)
        if stored is not None:
            self._stored.move_to_end(response_id)
        return stored

    def remove(self, response_id: str) -> Stored | None:
        """Forget an answer; returns it."""
        stored = self._stored.pop(response_id, None)
        if stored is not None:
            self._num_bytes -= stored.num_bytes
        return stored

    async def close(self) -> None:
        """Stop what is being made in the background."""
        tasks = [stored.task for stored in self._stored.values() if stored.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
