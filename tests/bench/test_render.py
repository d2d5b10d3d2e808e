"""The page of benchmarks comes from its template and the newest records, and so do the plots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sash.bench import render
from sash.bench.cases import Case, Timing, figures
from sash.bench.render import page_text, read_records, wanted_plots, write_page
from sash.spec.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent
WHERE = {
    "date": "2031-02-03T04:05:06+00:00",
    "commit": "abc",
    "cpu": "A Processor",
    "cores": 2,
    "threads": 2,
    "python": "3.11.7",
    "repeats": 2,
    "ceiling": {"read_bytes_per_s": 4e10, "gemm_op_per_s": {"bfloat16": 9e11, "int8": 1.8e12}},
}


def peers_record(**more: Any) -> dict[str, Any]:
    found = []
    for length in (512, 4096):
        timings = {
            "sash": [Timing(1.0, 1.0), Timing(1.5, 1.0)],
            "vllm": [Timing(2.0, 2.0)] * 2,
            "llama.cpp": [Timing(4.0, 1.5)] if length == 512 else [],
        }
        found += figures(Case(length, 64), timings, lambda case, kind: 1000.0)
    return {
        "command": "sash bench peers",
        "model": "m",
        **WHERE,
        "engines": {name: {"version": "1.2"} for name in ("sash", "llama.cpp", "vllm")},
        "absent": {"openvino": "openvino: can't be installed: no such package"},
        "perplexity": {"sash": 11.58, "vllm": 11.6},
        "figures": found,
        **more,
    }


def offline_record() -> dict[str, Any]:
    return {
        "command": "sash bench offline",
        "model": "m",
        **WHERE,
        "versions": {"sash": "1.2", "torch": "2"},
        "figures": figures(Case(16, 8, 4), {"sash": [Timing(0.1, 0.1)]}, lambda case, kind: 320.0),
        "perplexity": {"2048": 11.59},
        "token_s": {"1000": 0.01, "30000": 0.0101},
        "memory": [
            {"tokens": n, "pool_bytes": {"window": 1 << 20, "full": n << 10}, "resident_bytes": 800_000_000}
            for n in (1024, 32768)
        ],
        "first_token_s": [4.5, 2.25],
    }


def ops_record() -> dict[str, Any]:
    figure = {"name": "attention", "seconds": 1e-5, "per_s": 2e10, "unit": "GB/s", "ceiling_per_s": 4e10}
    return {
        "command": "sash bench ops",
        "model": "m",
        **WHERE,
        "dtype": "bfloat16",
        "kernels": "native avx512",
        "growth": {"window": 1.012},
        "figures": [figure],
    }


def newest(folder: Path, *records: dict[str, Any]) -> Any:
    file = folder / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_records(file)


def test_a_comparison_becomes_a_table(tmp_path: Path) -> None:
    text = page_text("# Page\n\n{{ peers m }}\n\nEnd.\n", newest(tmp_path, peers_record()), "plots")
    assert text.splitlines() == [
        "# Page",
        "",
        "2031-02-03, commit abc; A Processor, 2 cores, 2 threads; Python 3.11.7; sash 1.2, llama.cpp 1.2, vllm 1.2; "
        "runs of a case: 2. Ceilings: memory 40 GB/s; large products in GFLOP/s: bfloat16 900, int8 1800.",
        "",
        "| tokens per second | sash | llama.cpp | vllm | ratio to the best | ceiling | of it |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| prefill 512 | 427 ±20 % | 128 | 256 ±0 % | **1.67** (vllm) | 1000 | 43 % |",
        "| decode after 512 | 63.0 ±0 % | 42.0 | 31.5 ±0 % | **1.50** (llama.cpp) | 1000 | 6 % |",
        "| prefill 4096 | 3413 ±20 % | – | 2048 ±0 % | **1.67** (vllm) | 1000 | 341 % |",
        "| decode after 4096 | 63.0 ±0 % | – | 31.5 ±0 % | **2.00** (vllm) | 1000 | 6 % |",
        "",
        "Perplexity of the same 1024 tokens: sash 11.580, vllm 11.600.",
        "",
        "Absent: openvino (openvino: can't be installed: no such package).",
        "",
        "![Decode speed by context](plots/m-decode.svg)",
        "![Prefill speed by length](plots/m-prefill.svg)",
        "",
        "End.",
    ]


def test_sash_alone_and_single_ops_become_tables_too(tmp_path: Path) -> None:
    text = page_text("{{ offline m }}\n{{ ops m }}\n", newest(tmp_path, offline_record(), ops_record()), "plots")
    for line in (
        "| 4 requests x 8 | 160 | 320 | 50 % |",
        "| 2048 | 11.5900 |",
        "| 30000 | 10.10 |",
        "| 32768 | 1.00 MiB | 32.00 MiB | 800 MB |",
        "From the command to its first token, start by start: 4.50, 2.25 s.",
        "![Memory by length](plots/m-memory.svg)",
        "| bfloat16, native avx512 | µs | rate | ceiling | of it |",
        "| attention | 10.0 | 20.0 GB/s | 40 | 50 % |",
        "A decoding row after 30 000 tokens takes 1.01 × the time of one after 1000 in window layers.",
    ):
        assert line in text.splitlines()


def test_the_newest_record_of_a_model_counts(tmp_path: Path) -> None:
    old_form = {
        "command": "sash bench offline",
        "model": "m",
        "figures": [{"name": "prefill 512", "sash": 1.0, "peer": 2.0}],
    }
    other = peers_record(model="n")
    found = newest(tmp_path, old_form, peers_record(commit="old"), other, peers_record(commit="new"))
    assert found.keys() == {("peers", "m"), ("peers", "n")}
    assert found["peers", "m"]["commit"] == "new"
    assert wanted_plots(found) == [("decode", "m"), ("prefill", "m"), ("decode", "n"), ("prefill", "n")]


def test_what_is_missing_or_wrong_is_said(tmp_path: Path) -> None:
    assert page_text("{{ peers m }}\n", {}, "plots") == "Not measured yet: `sash bench peers`.\n"
    with pytest.raises(ConfigError, match=r"the template asks for 'tables'; use peers, offline, ops"):
        page_text("{{ tables m }}\n", {}, "plots")
    with pytest.raises(ConfigError, match=r"none.jsonl can't be read"):
        read_records(tmp_path / "none.jsonl")
    (tmp_path / "bad.jsonl").write_text("{}x\n")
    with pytest.raises(ConfigError, match=r"bad.jsonl:1 is not a JSON line"):
        read_records(tmp_path / "bad.jsonl")
    for line in ("{}", "[1]", '{"figures": []}', '{"figures": [{}]}', "null"):
        (tmp_path / "odd.jsonl").write_text(line)
        with pytest.raises(ConfigError, match=r"odd.jsonl:1 is no record of sash bench"):
            read_records(tmp_path / "odd.jsonl")


def test_page_and_plots_are_small_and_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    newest(tmp_path, peers_record(), offline_record())
    (tmp_path / "in").write_text("{{ peers m }}\n{{ offline m }}\n")
    page, plots = tmp_path / "docs" / "page.md", tmp_path / "docs" / "plots"
    page.parent.mkdir()
    drawn = []
    for _ in range(2):
        write_page(tmp_path / "records.jsonl", tmp_path / "in", page, plots)
        drawn.append({file.name: file.read_text() for file in plots.iterdir()})
    assert drawn[0] == drawn[1]
    assert drawn[0].keys() == {"m-decode.svg", "m-prefill.svg", "m-memory.svg"}
    assert all(len(svg) < 100_000 for svg in drawn[0].values())
    assert "llama.cpp" in drawn[0]["m-decode.svg"] and "window pool" in drawn[0]["m-memory.svg"]
    assert "](plots/m-memory.svg)" in page.read_text()


def test_the_committed_page_is_what_its_template_and_records_give() -> None:
    records = read_records(ROOT / "docs" / "records" / "bench.jsonl")
    template = (ROOT / "docs" / "benchmarks.md.in").read_text(encoding="utf-8")
    assert page_text(template, records, "plots") == (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8"), (
        "run: sash bench render"
    )
    assert {render.plot_name(*plot) for plot in wanted_plots(records)} <= {
        f.name for f in (ROOT / "docs" / "plots").glob("*")
    }
