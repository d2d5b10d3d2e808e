"""A worker seen from outside: started, asked with a deadline, asleep between questions, ended for certain."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sash.spec.errors import SashError

_SHOWN_LINES = 4


class PeerError(SashError):
    """A peer can't be made, or its worker failed, ended or hung. The rest can go on."""


class Worker:
    """One engine's process (see ``sash.bench.peers.workers.worker``), in a process group of its own.

    Between two questions the whole group is stopped by signal: threads of another engine that would
    otherwise spin can't disturb the one being timed.
    """

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        except OSError as error:
            self._stderr.close()
            raise PeerError(f"{name}: can't start {command[0]} ({error.strerror})") from error
        self._unread = b""

    def ask(self, do: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """The worker's answer to one request.

        Raises:
            PeerError: it answered with an error, or ended, or took longer than ``timeout_s``; in the last two
                cases it is gone.
        """
        self._signal(signal.SIGCONT)
        line = self._exchange(do, json.dumps({"do": do, **arguments}).encode() + b"\n", timeout_s)
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError as error:
            self.close()
            raise PeerError(f"{self.name}: {do} was answered with {line[:80]!r}, which is not JSON") from error
        self._signal(signal.SIGSTOP)
        if "error" in answer:
            raise PeerError(f"{self.name}: {do} failed: {answer['error']}")
        result: dict[str, Any] = answer["ok"]
        return result

    def close(self) -> None:
        """End the worker and everything it started; closing twice is fine."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            with contextlib.suppress(OSError):  # a pipe whose reader is gone can't be flushed
                if stream is not None:
                    stream.close()

    def _exchange(self, do: str, request: bytes, timeout_s: float) -> bytes:
        """Send a line and read one."""
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None and pipe_out is not None
        if pipe_out.closed:
            raise PeerError(f"{self.name}: is gone, so it can't {do}")
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(pipe_out, selectors.EVENT_READ)
            with contextlib.suppress(BrokenPipeError):  # it has ended: reading says so
                pipe_in.write(request)
                pipe_in.flush()
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.close()
                    raise PeerError(f"{self.name}: {do} took longer than {timeout_s:g} s and was ended")
                data = os.read(pipe_out.fileno(), 1 << 16)
                if not data:
                    raise PeerError(f"{self.name}: ended during {do}: {self._last_words()}")
                self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        """The end of its standard error; the worker is gone afterwards."""
        self._signal(signal.SIGKILL)
        status = self._process.wait()
        self._stderr.seek(0)
        lines = [line.strip() for line in self._stderr.read().decode(errors="replace").splitlines() if line.strip()]
        self.close()
        return " | ".join(lines[-_SHOWN_LINES:]) or f"no message, exit code {status}"

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is not None:  # its number may be somebody else's by now
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # ended, not yet waited for
            os.killpg(self._process.pid, number)
