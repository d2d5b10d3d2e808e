"""Environments and converted models are made once, whole or not at all."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from sash.bench.peers import environment
from sash.bench.peers.catalogue import Peer, worker_env
from sash.bench.peers.environment import Workshop, run
from sash.bench.peers.process import PeerError
from sash.spec.locate import ModelSource

PEER = Peer("a peer", "adapter_a", "openvino", ("some-engine==1.2", "torch==2"), removed=("torchvision",))


class Machine:
    """Stands for ``run``: remembers commands, and fails where it is told to."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.fails_at = ""

    def run(self, command: Sequence[str], failed: str, timeout_s: float) -> None:
        self.commands.append(list(command))
        if self.fails_at and self.fails_at in command:
            raise PeerError(f"{failed}: as told")
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True, exist_ok=True)
        if command[1].endswith(".py"):
            Path(command[-1]).mkdir()

    def told(self) -> list[str]:
        """What was run since the last call, in a word each."""
        words = {"venv", "install", "uninstall", "make_folder.py", "make_openvino.py"}
        told = [w for c in self.commands for w in (Path(part).name for part in c) if w in words]
        self.commands.clear()
        return told


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(environment, "run", machine.run)
    return machine


@pytest.fixture
def gguf(tmp_path: Path) -> ModelSource:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    return ModelSource("gguf", file, "org/model")


def test_an_environment_is_made_once(tmp_path: Path, machine: Machine) -> None:
    said: list[str] = []
    workshop = Workshop(tmp_path, said.append)
    python = workshop.python(PEER)
    assert python == tmp_path / "a-peer" / "bin" / "python"
    install = machine.commands[1]
    assert install[0] == str(python) and install[-2:] == ["some-engine==1.2", "torch==2"]
    assert machine.commands[2][-1] == "torchvision"
    assert machine.told() == ["venv", "install", "uninstall"]
    assert said == [f"installing some-engine==1.2, torch==2 into {tmp_path / 'a-peer'} (minutes, the first time)"]
    assert Workshop(tmp_path).python(PEER) == python
    assert machine.told() == []


def test_other_versions_make_it_afresh(tmp_path: Path, machine: Machine) -> None:
    Workshop(tmp_path, print).python(PEER)
    machine.told()
    Workshop(tmp_path, print).python(Peer("a peer", "adapter_a", "folder", ("some-engine==1.3",)))
    assert machine.told() == ["venv", "install"]


def test_what_was_begun_for_other_versions_does_not_count_for_the_first(tmp_path: Path, machine: Machine) -> None:
    workshop = Workshop(tmp_path, print)
    workshop.python(PEER)
    machine.fails_at = "some-engine==1.3"
    with pytest.raises(PeerError, match="can't be installed"):
        workshop.python(Peer("a peer", "adapter_a", "folder", ("some-engine==1.3",)))
    machine.told()
    workshop.python(PEER)
    assert machine.told() == ["venv", "install", "uninstall"]


@pytest.mark.parametrize("step", ["venv", "install", "uninstall"])
def test_a_failed_step_leaves_nothing_that_counts_as_made(tmp_path: Path, machine: Machine, step: str) -> None:
    workshop = Workshop(tmp_path, print)
    machine.fails_at = step
    with pytest.raises(PeerError, match=r"a peer.*as told"):
        workshop.python(PEER)
    machine.fails_at = ""
    machine.told()
    workshop.python(PEER)
    assert machine.told() == ["venv", "install", "uninstall"]


def test_a_model_is_converted_once_for_each_form(tmp_path: Path, machine: Machine, gguf: ModelSource) -> None:
    workshop = Workshop(tmp_path / "peers", lambda text: None)
    found = workshop.model(PEER, gguf)
    assert (found.name, found.parent.parent) == ("openvino-int8", tmp_path / "peers" / "models")
    assert [word for word in machine.told() if word.startswith("make")] == ["make_folder.py", "make_openvino.py"]
    assert workshop.model(PEER, gguf) == found
    assert machine.told() == []
    gguf.path.write_bytes(b"GGUF, another")
    other = workshop.model(PEER, gguf)
    os.utime(gguf.path, (1, 1))
    assert len({found, other, workshop.model(PEER, gguf)}) == 3


def test_each_form_comes_from_what_is_there(tmp_path: Path, machine: Machine, gguf: ModelSource) -> None:
    workshop = Workshop(tmp_path / "peers", lambda text: None)
    reader = Peer("reader", "", "gguf", ())
    assert workshop.model(reader, gguf) == gguf.path
    folder = ModelSource("folder", tmp_path, "folder")
    assert workshop.model(Peer("plain", "", "folder", ()), folder) == tmp_path
    assert machine.told() == []
    with pytest.raises(PeerError, match=r"reader reads GGUF files, and .* is a folder"):
        workshop.model(reader, folder)


def test_a_command_that_fails_says_its_last_lines() -> None:
    with pytest.raises(PeerError, match=r"^no luck: b \| c \| d$"):
        run([sys.executable, "-c", "print('a\\nb\\nc'); raise SystemExit('d')"], "no luck", 30)
    with pytest.raises(PeerError, match=r"^no luck: a{160}$"):
        run([sys.executable, "-c", "print('a' * 500); print('WARNING: b'); raise SystemExit(1)"], "no luck", 30)
    with pytest.raises(PeerError, match=r"^no luck: exit code 3$"):
        run([sys.executable, "-c", "raise SystemExit(3)"], "no luck", 30)
    with pytest.raises(PeerError, match=r"took longer than 0.2 s"):
        run([sys.executable, "-c", "import time; time.sleep(30)"], "no luck", 0.2)
    with pytest.raises(PeerError, match=r"no luck: /no/such can't start"):
        run(["/no/such"], "no luck", 30)


def test_workers_get_their_threads_and_no_network(tmp_path: Path) -> None:
    env = worker_env(PEER, tmp_path, 1)
    assert (env["OMP_NUM_THREADS"], env["HF_HUB_OFFLINE"]) == ("1", "1")
    vllm = worker_env(Peer("vllm", "", "folder", ()), tmp_path, 1)
    assert vllm["VLLM_CPU_OMP_THREADS_BIND"].isdecimal() and vllm["VLLM_CACHE_ROOT"] == str(tmp_path / "cache")
