"""The loop of the core's process: what waits for its grammar neither hangs nor is compiled for nobody."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from sash import SamplingParams
from sash.engine.messages import Accepted, AddRequest, CancelRequest, Message, Stop, Update
from sash.engine.process import _serve
from sash.engine.wire import Channel, FrameReader, frame
from sash.spec.structured import StructuredOutputs


class Grammars:
    """Grammars that are compiled when the script says so."""

    def __init__(self) -> None:
        self.undecided: set[StructuredOutputs] = set()
        self.forgotten: list[StructuredOutputs] = []
        self.sockets: list[socket.socket] = []

    def poll(self) -> None:
        pass

    def forget(self, wanted: StructuredOutputs) -> None:
        self.forgotten.append(wanted)


class Core:
    """A core whose last step takes the news of every grammar."""

    def __init__(self) -> None:
        self.grammars = Grammars()
        self.config = SimpleNamespace(options=SimpleNamespace(request_timeout_s=None))
        self.has_work = True
        self.seen = threading.Event()

    def check_request(self, request: AddRequest) -> None:
        if request.params.structured_outputs is not None and self.has_work:
            self.grammars.undecided.add(request.params.structured_outputs)

    def compiles(self, request: AddRequest) -> bool:
        return request.params.structured_outputs in self.grammars.undecided

    def add(self, request: AddRequest) -> None:
        assert not self.compiles(request)

    def cancel(self, message: CancelRequest) -> None:
        pass

    def step(self) -> list[Message]:
        if self.seen.is_set():
            self.grammars.undecided.clear()
            self.has_work = False
        return []


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
def client(core: Core) -> Iterator[socket.socket]:
    """The other end of the socket to a loop around ``core``."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=_serve, args=(core, Channel(theirs)))
    thread.start()
    ours.settimeout(20)
    yield ours
    ours.sendall(frame([Stop()]))
    thread.join()
    ours.close()
    theirs.close()


def add(name: str, regex: str) -> AddRequest:
    params = SamplingParams(structured_outputs=StructuredOutputs(regex=regex))
    return AddRequest((f"{name}.0",), (5, 6), params, (1,))


def test_news_that_a_last_step_took_of_a_grammar_are_acted_on(core: Core, client: socket.socket) -> None:
    client.sendall(frame([add("0", "a")]))
    while not core.grammars.undecided:
        pass
    core.seen.set()
    assert FrameReader().feed(client.recv(1000)) == [Accepted("0.0")]


def test_a_grammar_is_given_up_with_the_last_who_waits_for_it(core: Core, client: socket.socket) -> None:
    adds = [add("0", "a"), add("1", "a"), add("2", "b")]
    client.sendall(frame([*adds, CancelRequest("0.0"), CancelRequest("2.0")]))
    while not core.grammars.forgotten:
        pass
    assert core.grammars.forgotten == [StructuredOutputs(regex="b")]
    client.sendall(frame([CancelRequest("1.0")]))
    while len(core.grammars.forgotten) < 2:
        pass
    assert core.grammars.forgotten[1] == StructuredOutputs(regex="a")


def test_the_time_of_a_request_passes_while_its_grammar_waits(core: Core, client: socket.socket) -> None:
    core.config.options.request_timeout_s = 0.0
    client.sendall(frame([add("0", "a")]))
    assert FrameReader().feed(client.recv(1000)) == [Accepted("0.0"), Update("0.0", finish_reason="timeout")]
    assert core.grammars.forgotten == [StructuredOutputs(regex="a")]
