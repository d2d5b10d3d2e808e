"""``vllm bench serve``, unchanged, and locust: every request is answered, every token counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sash.bench.peers.catalogue import PEERS
from sash.bench.peers.environment import Workshop, make_environment
from sash.bench.serving.client import Address
from sash.bench.serving.generators import LOCUST, LocustRun, Shape, VllmBench, run_locust
from sash.spec.locate import cache_dir

pytestmark = [pytest.mark.real, pytest.mark.e2e, pytest.mark.timeout(3600)]
LOCUSTFILE = Path(__file__).parents[2] / "deploy" / "load" / "locustfile.py"


def test_vllm_bench_serve(gemma: Address, tokenizer_of: Callable[[str], Path], tmp_path: Path) -> None:
    python = Workshop(cache_dir() / "peers").python(PEERS["vllm"])
    bench = VllmBench(python, tokenizer_of("gemma3-270m"), tmp_path)
    found = bench.run(gemma, "gemma3-270m", Shape(16, 100, 20, 8), seed=1)
    assert found["requests"] == 16 and found["output_tokens"] == 16 * 20
    # It decodes its random ids to texts; the server's tokenizer reads the same number back, or nearly.
    assert abs(found["input_tokens"] - 16 * 100) <= 32
    assert 0 < found["ttft_ms"]["p50"] <= found["ttft_ms"]["p99"] < found["e2el_ms"]["p99"]


@pytest.mark.parametrize("rate", [None, 2.0])
def test_locust(gemma: Address, tmp_path: Path, rate: float | None) -> None:
    python = make_environment(cache_dir() / "clients" / "locust", "locust", LOCUST)
    run = LocustRun(4, 10, rate, cancel_share=0.3, output=12, longest=300)
    found = run_locust(python, LOCUSTFILE, gemma, "gemma3-270m", run, tmp_path)
    assert found["whole"]["count"] > 2 and found["first"]["count"] >= found["whole"]["count"]
    assert all(figures["failures"] == 0 for figures in found.values())
