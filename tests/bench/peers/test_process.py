"""Workers are asked with a deadline, sleep in between, and say why they are gone."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sash.bench.peers.process import PeerError, Worker

Start = Callable[[str], Worker]
FAKE = Path(__file__).parent / "fake_worker.py"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Worker] = []

    def start(mood: str) -> Worker:
        made.append(Worker("fake", [sys.executable, str(FAKE), mood, str(tmp_path / "fake.log")]))
        return made[-1]

    yield start
    for worker in made:
        worker.close()


def state(pid: int) -> str:
    """R, S, T (stopped) … as Linux has it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_an_answer_comes_back_and_arguments_arrive(start: Start, tmp_path: Path) -> None:
    worker = start("well")
    assert worker.ask("load", 20, model="m", threads=2)["version"] == "1.5"
    assert worker.ask("score", 20, tokens=[1, 2]) == {"nll": [2.0, 2.0]}
    assert (tmp_path / "fake.log").read_text() == '{"do": "score", "tokens": [1, 2]}\n'


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux's process states")
def test_a_worker_is_stopped_between_questions_and_gone_in_the_end(start: Start) -> None:
    worker = start("well")
    worker.ask("load", 20)
    pid = worker._process.pid
    deadline = time.monotonic() + 5
    while state(pid) != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state(pid) == "T"
    worker.ask("score", 20)
    worker.close()
    worker.close()
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


def test_an_error_is_told_and_the_worker_goes_on(start: Start) -> None:
    worker = start("fails-score")
    with pytest.raises(PeerError, match=r"^fake: score failed: ValueError: no score today$"):
        worker.ask("score", 20)
    assert worker.ask("run", 20)["decode_s"] == 2.0


@pytest.mark.parametrize(
    ("mood", "timeout_s", "message"),
    [
        ("dies-run", 20, "^fake: ended during run: out of memory$"),
        ("hangs-run", 0.5, "^fake: run took longer than 0.5 s and was ended$"),
        ("babbles-run", 20, "^fake: run was answered with b'hello', which is not JSON$"),
    ],
)
def test_a_worker_that_is_lost_says_why(start: Start, mood: str, timeout_s: float, message: str) -> None:
    worker = start(mood)
    with pytest.raises(PeerError, match=message):
        worker.ask("run", timeout_s)
    assert worker._process.poll() is not None
    with pytest.raises(PeerError, match=r"^fake: is gone, so it can't run$"):
        worker.ask("run", timeout_s)


def test_a_command_that_is_not_there_is_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"can't start"):
        Worker("fake", [str(tmp_path / "python")])
