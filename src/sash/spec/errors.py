"""Errors a user can act on. Every message names the option or field and a value that works."""

from __future__ import annotations

from collections.abc import Sequence

# Items of a list that an error spells out.
SHOWN = 20


class SashError(Exception):
    """Base of every error that sash raises on purpose; the command line exits with code 2 on it."""


class ConfigError(SashError):
    """An option or a combination of options that can't work (invariant 7): refused at start."""


class ModelError(SashError):
    """A model file or its description is broken, incomplete or of a kind that sash doesn't run."""


class RequestError(SashError):
    """One request is refused; the engine and the other requests go on."""


class OverloadedError(SashError):
    """Too much is waiting: the request was not taken, and may come again after ``retry_after_s`` seconds."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(SashError):
    """The engine's process has ended or doesn't run yet; what was open there is lost."""


class EngineStoppedError(EngineDeadError):
    """The engine was told to end while the request was open."""


class OutOfPagesError(SashError):
    """A pool has too few pages for an operation; nothing was changed."""


class LedgerError(AssertionError):
    """The books don't balance: a defect in sash, found by a self-check."""


def enumerated(items: Sequence[str], separator: str = ", ") -> str:
    """The first ``SHOWN`` items, and how many more there are."""
    more = [f"… and {len(items) - SHOWN} more"] if len(items) > SHOWN else []
    return separator.join([*items[:SHOWN], *more])
