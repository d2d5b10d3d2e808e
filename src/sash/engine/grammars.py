"""Grammars: which tokens may follow, from processes of their own (``sash.engine.grammar_process``).

An answer with ``structured_outputs`` has a ``Constraint``. When a token has become part of the answer, ``ask`` has the
next mask made, which takes its time beside the step that is computed meanwhile. A mask is read only when it is ready.
"""

from __future__ import annotations

import heapq
import mmap
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec
import numpy as np

from sash.engine.grammar_process import Answer, Ask, Setup
from sash.engine.wire import BodyReader, pack
from sash.spec.errors import RequestError
from sash.spec.log import logger
from sash.spec.structured import StructuredOutputs

# Grammars compiled at once; the others wait for their turn.
_COMPILING = 2
# Grammars remembered with what became of them, whether or not their process lives.
_KNOWN = 256
# Answers that may have a mask at once: those that run, and those that were preempted.
_SLOTS = 1024
# A process that is starved of processor time for so long is given up.
_LAST_S = 60.0
_TOO_COMPLEX = "it takes more time or memory than a grammar may; make it simpler"


class Grammar:
    """One form that answers may have.

    ``decided``: it was compiled, or refused with ``error``. ``first`` is the mask before any token [ceil(V / 8)] uint8,
    lowest bit first; ``ended``: nothing but the empty text fits.
    """

    __slots__ = ("decided", "ended", "error", "first", "link", "wanted")

    def __init__(self, wanted: StructuredOutputs) -> None:
        self.wanted = wanted
        self.decided = self.ended = False
        self.error = ""
        self.first: np.ndarray | None = None
        self.link: _Link | None = None


class Constraint:
    """Where one answer stands in its grammar.

    While ``ready``, ``bits`` [ceil(V / 8)] uint8 say which tokens may follow (lowest bit first), unless the text has
    ``ended`` because nothing may, or ``error`` says why that can't be told.
    """

    __slots__ = ("asked_s", "bits", "closed", "ended", "error", "grammar", "link", "owner", "ready", "slot", "told")

    def __init__(self, owner: Grammars, grammar: Grammar) -> None:
        self.owner, self.grammar = owner, grammar
        self.bits, self.ended, self.error = grammar.first, grammar.ended, ""
        self.ready = True
        self.link: _Link | None = None
        self.slot: int | None = None
        self.told = 0  # tokens that the process knows
        self.asked_s = 0.0
        self.closed = False


class _Link:
    """Our end of the socket to a grammar's process. ``open`` are questions without an answer, ``users`` the
    constraints that it keeps a matcher for."""

    def __init__(self, sock: socket.socket, grammar: Grammar) -> None:
        self.socket = sock
        self.grammar = grammar
        self.reader = BodyReader()
        self.open: dict[int, Constraint] = {}
        self.users = 0


class _Host:
    """The process that forks the others, and the memory that masks are written to."""

    def __init__(self, setup: Setup) -> None:
        self.links: set[socket.socket] = set()
        ours, theirs = socket.socketpair()
        self.control = ours
        file = _memory(_SLOTS * setup.mask_bytes)
        with theirs:
            # -P: a folder named sash where we happen to run must not stand in for the package.
            command = (sys.executable, "-P", "-m", "sash.engine.grammar_process", str(theirs.fileno()))
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(theirs.fileno(),)
            )
        socket.send_fds(ours, [msgspec.msgpack.encode(setup)], [file])
        shared = mmap.mmap(file, 0)
        os.close(file)
        self.masks = np.frombuffer(shared, np.uint8).reshape(_SLOTS, setup.mask_bytes)

    def end(self) -> None:
        """Every process of it ends."""
        for link in self.links:
            link.close()
        self.control.close()
        self.process.kill()
        self.process.wait()


def _memory(size: int) -> int:
    """A file of so many bytes that has no name; only what is written to takes memory."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("sash-masks")
    else:
        with tempfile.TemporaryFile() as named:
            file = os.dup(named.fileno())
    os.ftruncate(file, size)
    return file


class Grammars:
    """All grammars of a core. Nothing is started before the first is wanted.

    Args:
        model: file or folder whose tokenizer is used.
        vocab_size: V; masks have a bit for each token.
        stop_token_ids: the model's own end tokens: allowed where a text may end.
        max_processes: grammars whose processes are kept, beyond those in use.
        compile_s: processor seconds that compiling one may take.
    """

    def __init__(
        self,
        model: str,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        max_processes: int = 16,
        compile_s: float = 3.0,
    ) -> None:
        self._setup = Setup(model, vocab_size, tuple(stop_token_ids), -(-vocab_size // 8), compile_s)
        self._max_processes = max_processes
        self._known: OrderedDict[StructuredOutputs, Grammar] = OrderedDict()
        self._queue: deque[Grammar] = deque()
        self._compiling: set[Grammar] = set()
        self._links: OrderedDict[_Link, None] = OrderedDict()  # the one that was used last is last
        self._free = list(range(_SLOTS))
        self._number = 0
        self._host: _Host | None = None

    def begin(self, wanted: StructuredOutputs) -> Grammar:
        """The grammar, if need be undecided yet: its turn to be compiled comes."""
        grammar = self._known.get(wanted)
        if grammar is None:
            grammar = self._known[wanted] = Grammar(wanted)
            self._queue.append(grammar)
            self._start_next()
            for old in [g for g in self._known.values() if g.decided and g.link is None][:-_KNOWN]:
                del self._known[old.wanted]
        self._known.move_to_end(wanted)
        return grammar

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """The grammar, once it is decided.

        Raises:
            RequestError: it can't be compiled.
        """
        grammar = self.begin(wanted)
        while not grammar.decided:
            self._read(self._links, None)
        if grammar.error:
            raise RequestError(f"{wanted.origin} {wanted.kind} can't be used: {grammar.error}")
        return grammar

    def forget(self, wanted: StructuredOutputs) -> None:
        """Nobody waits for it any more: it isn't compiled, unless that has begun."""
        grammar = self._known.get(wanted)
        if grammar is not None and grammar in self._queue:
            self._queue.remove(grammar)
            del self._known[wanted]

    @property
    def sockets(self) -> list[socket.socket]:
        """Readable when there is news of a grammar that is being compiled."""
        return [grammar.link.socket for grammar in self._compiling if grammar.link is not None]

    def constraint(self, grammar: Grammar) -> Constraint:
        """The place of a new answer; its first mask is ready."""
        return Constraint(self, grammar)

    def ask(self, constraint: Constraint, tokens: Sequence[int], start: int) -> None:
        """Have the mask made that follows ``tokens[start:]``, the answer so far."""
        grammar = constraint.grammar
        if constraint.slot is None:
            if not self._free:
                constraint.error = "too many answers with structured_outputs at once; try again later"
                return
            constraint.slot = heapq.heappop(self._free)
        link = grammar.link or self._open(grammar)
        self._links.move_to_end(link)
        fresh = constraint.link is not link
        if fresh:
            constraint.link, constraint.told = link, 0
            link.users += 1
        self._number += 1
        new = tuple(tokens[start + constraint.told :])
        constraint.told += len(new)
        constraint.ready, constraint.asked_s = False, time.monotonic()
        link.open[self._number] = constraint
        self._send(link, Ask(constraint.slot, self._number, fresh, new))

    def wait(self, constraints: Iterable[Constraint], patience_s: float) -> None:
        """Wait until all of them are ready, at most so long (without end for ever)."""
        until = time.monotonic() + patience_s
        while links := {c.link for c in constraints if not c.ready and c.link is not None}:
            left = until - time.monotonic()
            if not self._read(links, max(left, 0.0)) and left <= 0:
                break
        for constraint in constraints:
            if not constraint.ready and time.monotonic() - constraint.asked_s > _LAST_S and constraint.link:
                # Its process may still write to their slots, which nobody gets again.
                for asked in constraint.link.open.values():
                    asked.slot = None
                self._lose(constraint.link)

    def poll(self) -> None:
        """Take what has come."""
        self._read([link for link in self._links if link.open or link.grammar in self._compiling], 0.0)

    def close(self, constraint: Constraint) -> None:
        """The answer has ended."""
        link, slot = constraint.link, constraint.slot
        constraint.closed = True
        if link is None or slot is None:
            return
        if link in self._links:
            link.users -= 1
            self._send(link, Ask(slot, 0))
        if constraint.ready:
            heapq.heappush(self._free, slot)
        # Else its process may still write to the slot: it is free when that has answered.

    def shutdown(self) -> None:
        """End all processes; what is asked for again, or waits to be compiled, starts anew."""
        links = list(self._links)
        if self._host is not None:
            self._host = None
            self._finalizer()
        for link in links:
            self._lose(link)

    def _start_next(self) -> None:
        while self._queue and len(self._compiling) < _COMPILING:
            grammar = self._queue.popleft()
            self._compiling.add(grammar)
            self._open(grammar)

    def _open(self, grammar: Grammar) -> _Link:
        """A process for the grammar."""
        try:
            link = self._connect(grammar)
        except OSError:  # the host has died: another
            logger().warning("grammars_restart")
            self.shutdown()
            link = self._connect(grammar)
        grammar.link = link
        self._links[link] = None
        idle = [old for old in self._links if not old.users and not old.open and old.grammar.decided]
        for old in idle[: max(len(self._links) - self._max_processes, 0)]:
            self._drop(old)
        return link

    def _connect(self, grammar: Grammar) -> _Link:
        if self._host is None:
            self._host = _Host(self._setup)
            self._finalizer = weakref.finalize(self, _Host.end, self._host)
        ours, theirs = socket.socketpair()
        text = msgspec.msgpack.encode(grammar.wanted)
        file = _memory(len(text))
        try:
            with theirs:
                os.pwrite(file, text, 0)
                socket.send_fds(self._host.control, [b"g"], [theirs.fileno(), file])
        except OSError:
            ours.close()
            raise
        finally:
            os.close(file)
        link = _Link(ours, grammar)
        self._host.links.add(ours)
        return link

    def _send(self, link: _Link, ask: Ask) -> None:
        # A process that has ended is found out when it is read from.
        with suppress(OSError):
            link.socket.sendall(pack(msgspec.msgpack.encode(ask)))

    def _read(self, links: Iterable[_Link], timeout_s: float | None) -> bool:
        """Take what comes from any of ``links`` within ``timeout_s`` seconds; False when nothing did."""
        poll = select.poll()
        by_number: dict[int, _Link] = {}
        for link in links:
            poll.register(link.socket, select.POLLIN)
            by_number[link.socket.fileno()] = link
        if not by_number:
            return False
        found = poll.poll(None if timeout_s is None else timeout_s * 1000)
        for number, _ in found:
            link = by_number[number]
            try:
                data = link.socket.recv(1 << 20)
            except OSError:
                data = b""
            if not data:
                self._lose(link)
            for body in link.reader.feed(data):
                self._take(link, msgspec.msgpack.decode(body, type=Answer))
        return bool(found)

    def _take(self, link: _Link, answer: Answer) -> None:
        if not answer.number:
            self._decide(link.grammar, answer)
            return
        constraint = link.open.pop(answer.number)
        constraint.ready = True
        if constraint.closed:
            heapq.heappush(self._free, answer.slot)
            return
        constraint.ended = answer.ended
        constraint.error = answer.error and f"structured_outputs can't be followed any further: {answer.error}"
        assert self._host is not None
        constraint.bits = self._host.masks[answer.slot]

    def _decide(self, grammar: Grammar, answer: Answer) -> None:
        if grammar.decided:  # it was compiled again, as its process had been given up
            return
        grammar.decided, grammar.error, grammar.ended = True, answer.error, answer.ended
        grammar.first = np.frombuffer(answer.mask, np.uint8) if answer.mask else None
        self._compiling.discard(grammar)
        if answer.error and grammar.link is not None:
            self._drop(grammar.link)
        self._start_next()

    def _lose(self, link: _Link) -> None:
        """Its process has ended, or is given up: beyond its limits."""
        self._drop(link)
        for constraint in link.open.values():
            constraint.ready = True
            constraint.error = f"structured_outputs can't be followed any further: {_TOO_COMPLEX}"
            if constraint.closed and constraint.slot is not None:
                heapq.heappush(self._free, constraint.slot)
        link.open.clear()
        if not link.grammar.decided:
            self._decide(link.grammar, Answer(0, 0, error=_TOO_COMPLEX))

    def _drop(self, link: _Link) -> None:
        """Close the socket, on which its process ends."""
        self._links.pop(link, None)
        if self._host is not None:
            self._host.links.discard(link.socket)
        link.socket.close()
        if link.grammar.link is link:
            link.grammar.link = None
