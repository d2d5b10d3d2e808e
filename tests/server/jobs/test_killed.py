"""A process that is killed in the middle of a job: the next one goes on, nothing is lost, nothing runs twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.jobs import process

COUNT = 60


@contextmanager
def server(folder: Path, log: Path) -> Iterator[httpx.Client]:
    """A server that is killed at the end."""
    root = Path(__file__).parents[3]
    command = [sys.executable, process.__file__, str(folder), str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root, env=_path(root)) as child:
        try:
            assert child.stdout is not None and child.stderr is not None
            port = child.stdout.readline()
            assert port, child.stderr.read().decode()
            with httpx.Client(base_url=f"http://127.0.0.1:{int(port)}", timeout=30) as client:
                yield client
        finally:
            child.kill()


def _path(root: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(root)}


def results(client: httpx.Client, job_id: str, **query: Any) -> list[str]:
    return client.get(f"/v1/jobs/{job_id}/results", params=query).text.splitlines()


@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_a_killed_server_goes_on_where_it_was(folder: Path, kills: int) -> None:
    store, logs = folder / "jobs", [folder / f"log{i}" for i in range(kills + 1)]
    known: dict[int, str] = {}
    known_then: list[set[int]] = [set()]
    job_id = ""
    for number, log in enumerate(logs):
        with server(store, log) as client:
            if not number:
                prompts = [f"p{i}" for i in range(COUNT)]
                job_id = client.post("/v1/jobs", json={"prompts": prompts, "model": "tiny"}).json()["id"]
            last = number == kills
            wanted = COUNT if last else len(known) + COUNT // (2 * kills)
            lines: list[str] = []
            while len(lines) < wanted:
                time.sleep(0.005)
                lines = results(client, job_id, order="finished")
            after = {json.loads(line)["index"]: line for line in lines}
            assert len(after) == len(lines), "a request has two results"
            assert {index: after.get(index) for index in known} == known, "a result was lost or changed"
            known = after
            known_then.append(set(known))
            job = client.get(f"/v1/jobs/{job_id}").json()
            assert job["status"] == ("completed" if last else "running")
    assert sorted(known) == list(range(COUNT))
    answers = [json.loads(line)["response"]["body"] for line in known.values()]
    assert {answer["choices"][0]["text"] for answer in answers} == {"answer"}
    assert len({answer["id"] for answer in answers}) == COUNT
    for log, finished in zip(logs, known_then, strict=False):
        ran = [int(line.removeprefix("p")) for line in log.read_text().split()]
        assert len(ran) == len(set(ran)), "a request ran twice in one process"
        assert not finished & set(ran), "a request ran again although it had a result"


def test_two_servers_dont_share_a_store(folder: Path) -> None:
    with server(folder / "jobs", folder / "log"):
        command = [sys.executable, process.__file__, str(folder / "jobs"), str(folder / "log2")]
        root = Path(__file__).parents[3]
        second = subprocess.run(command, capture_output=True, text=True, cwd=root, env=_path(root), timeout=60)
    assert second.returncode != 0 and "is in use by another server" in second.stderr and "--jobs-dir" in second.stderr
