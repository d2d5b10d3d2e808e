"""Real servers, and clients in environments of their own in sash's cache folder, made the first time."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.real_models import real_model

from sash.bench.peers.environment import make_environment
from sash.bench.serving.client import Address
from sash.bench.serving.servers import Server, Setting, sash_launch
from sash.spec.load import load_spec
from sash.spec.locate import cache_dir, locate
from sash.text.export import tokenizer_files

# Pinned: what is tested is what is written here, whatever was released since.
CLIENTS = {
    "litellm": ("litellm==1.110.2",),
    "langchain": ("langchain-openai==1.7.4",),
    "lm-eval": ("lm_eval[api]==0.4.13", "transformers==5.24.0", "torch==2.13.0"),
}
# A test that can't reach a server fails at once; nobody goes to the network.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_PROXY": "*"}


def serving(name: str, folder: Path) -> Iterator[Address]:
    path = real_model(name)
    del path
    setting = Setting(locate(name), name, folder, 2048, 8, 2)
    server = Server(sash_launch(setting), folder / "server.log")
    try:
        yield server.address
    finally:
        server.close()


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """``sash serve smollm2-135m``, which has a chat template."""
    yield from serving("smollm2-135m", tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """``sash serve gemma3-270m``."""
    yield from serving("gemma3-270m", tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="session")
def python_of() -> Callable[[str], Path]:
    """The interpreter of a client's environment."""
    return lambda name: make_environment(cache_dir() / "clients" / name, name, CLIENTS[name])


@pytest.fixture(scope="session")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder that ``sash export-tokenizer`` writes."""

    def export(name: str) -> Path:
        folder = tmp_path_factory.mktemp("tokenizer")
        source = locate(name)
        for file, text in tokenizer_files(source, load_spec(source).max_position).items():
            (folder / file).write_text(text, encoding="utf-8")
        return folder

    return export


def run(command: list[str], address: Address, **env: str) -> str:
    """Standard output of a client that is told of the server by the environment; it must succeed."""
    own = {"OPENAI_BASE_URL": f"{address.url}/v1", "OPENAI_API_KEY": "none", **OFFLINE, **env}
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout
