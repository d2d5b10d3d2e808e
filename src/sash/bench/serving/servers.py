"""Servers as processes: how each is started, when it is ready; asleep while it isn't asked; ended for certain."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sash.bench.peers.catalogue import PEERS, worker_env
from sash.bench.peers.environment import Workshop
from sash.bench.peers.process import PeerError
from sash.bench.serving.client import Address, ClientError, fetch
from sash.spec.locate import ModelSource

HOST = "127.0.0.1"
VLLM = Path(__file__).with_name("vllm_command.py")
_POLL_S, _END_S = 0.2, 15.0


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a server. ``ready`` is the path that answers 200 once it takes requests."""

    name: str
    command: tuple[str, ...]
    address: Address
    ready: str = "/health"
    env: Mapping[str, str] = field(default_factory=dict)


class Server:
    """A running server, in a process group of its own; everything it prints goes into ``log``.

    Raises:
        PeerError: it can't start, ends, or isn't ready in ``timeout_s``; its last words are told.
    """

    def __init__(self, launch: Launch, log: Path, timeout_s: float = 600.0) -> None:
        self.name = launch.name
        self.address = launch.address
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            try:
                self._process = subprocess.Popen(
                    launch.command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **launch.env},
                    start_new_session=True,
                )
            except OSError as error:
                raise PeerError(f"{self.name}: can't start {launch.command[0]} ({error.strerror})") from error
        try:
            self._await(launch.ready, timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the process that was started."""
        return self._process.pid

    def _await(self, path: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            if self._process.poll() is not None:
                raise PeerError(f"{self.name}: ended with {self._process.returncode}: {self.last_words()}")
            with contextlib.suppress(ClientError):
                asyncio.run(fetch(self.address, path))
                return
            if time.monotonic() > deadline:
                raise PeerError(f"{self.name}: not ready after {timeout_s:g} s: {self.last_words()}")
            time.sleep(_POLL_S)

    def last_words(self) -> str:
        """The end of what it printed."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return " | ".join(line.strip()[:200] for line in lines[-4:]) or "no message"

    def sleep(self) -> None:
        """Stop it by signal, so that its threads can't disturb another's turn."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End it, politely at first; twice is fine."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        # What it has left behind in its group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is not None:  # its number may be somebody else's by now
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def free_address() -> Address:
    """A port of this machine that nobody has at the moment."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return Address(HOST, sock.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Setting:
    """What all servers are started with: ``context`` tokens each for ``requests`` at once, ``threads`` that compute."""

    source: ModelSource
    model: str
    tokenizer: Path
    context: int
    requests: int
    threads: int


def sash_launch(setting: Setting, *options: str) -> Launch:
    """``sash serve``, with further options."""
    address = free_address()
    command = (
        *(sys.executable, "-P", "-m", "sash", "serve", setting.model, "--port", str(address.port)),
        *("--max-num-seqs", str(setting.requests), "--max-model-len", str(setting.context)),
        *("--threads", str(setting.threads), "--jobs-dir", "none", *options),
    )
    return Launch("sash", command, address, "/ready")


def null_launch(recording: Path) -> Launch:
    """The null server on a recording."""
    address = free_address()
    command = (sys.executable, "-P", "-m", "sash.bench.serving.null_server", str(recording), "--port")
    return Launch("null", (*command, str(address.port)), address, "/health")


def llama_launch(setting: Setting, binary: Path) -> Launch:
    """llama.cpp's own server: a slot for each request, the context shared among them."""
    if setting.source.kind != "gguf":
        raise PeerError(f"llama-server reads GGUF files, and {setting.source.path} is a folder")
    address = free_address()
    command = (
        *(str(binary), "--model", str(setting.source.path), "--alias", setting.model),
        *("--host", HOST, "--port", str(address.port), "--threads", str(setting.threads)),
        *("--parallel", str(setting.requests), "--ctx-size", str(setting.requests * setting.context)),
    )
    return Launch("llama-server", command, address)


def vllm_launch(setting: Setting, workshop: Workshop) -> Launch:
    """vLLM's own server on the same weights in bfloat16, nothing cached from one request to the next."""
    peer = PEERS["vllm"]
    python, folder = workshop.python(peer), workshop.model(peer, setting.source)
    address = free_address()
    command = (
        *(str(python), str(VLLM), "serve", str(folder), "--served-model-name", setting.model),
        *("--tokenizer", str(setting.tokenizer), "--host", HOST, "--port", str(address.port)),
        *("--dtype", "bfloat16", "--max-model-len", str(setting.context), "--max-num-seqs", str(setting.requests)),
        "--no-enable-prefix-caching",
    )
    env = worker_env(peer, workshop.place(peer), setting.threads)
    del env["VLLM_ENABLE_V1_MULTIPROCESSING"]  # its core has a process of its own, as by default
    return Launch("vllm", command, address, "/health", env)
