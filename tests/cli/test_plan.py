from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.scripted import Run
from tests.cli.test_inspect import CONFIG


def document(run: Run, *arguments: str) -> dict[str, Any]:
    outcome = run("plan", *arguments, "--json")
    assert outcome.code == 0, outcome.err
    data: dict[str, Any] = json.loads(outcome.out)
    return data


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(CONFIG))
    return path


def test_the_answer_comes_first(run: Run) -> None:
    lines = run("plan", "gemma-3-27b", "--memory", "80GB", "--context", "32k").out.splitlines()
    assert "52 window 1024, 10 full" in lines[0]
    assert lines[1].startswith("5 requests of 32\u202f768 tokens fit 74.5 GiB")
    assert lines[2] == "= 50.3 GiB weights + 16.7 GiB KV + 7.45 GiB reserve"


def test_the_guide_shows_what_is_printed(run: Run) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
    command, _, shown = guide.split("```")[1].strip().partition("\n")
    assert run(*command.split()[2:]).out.strip() == shown.strip()


def test_short_by_default_and_everything_on_demand(run: Run) -> None:
    short, everything = (run("plan", "gemma-3-27b", *more).out for more in ([], ["--all"]))
    assert len(short.splitlines()) < 25
    for words in ("Pools of", "Ways to store it", "Operations", "Rules of thumb", "each way"):
        assert words in everything and words not in short
    assert "\x1b" not in everything


def test_four_questions(run: Run) -> None:
    known = ["gemma-3-27b", "--dtype", "int8"]
    memory = document(run, *known, "--context", "16k", "--concurrency", "3")["answer"]
    assert memory["solved"] == "memory"
    total = ["--memory", str(memory["memory_bytes"])]
    requests = document(run, *known, "--context", "16k", *total)["answer"]
    assert (requests["solved"], requests["requests"]) == ("requests", 3)
    context = document(run, *known, "--concurrency", "3", *total)["answer"]
    assert (context["solved"], context["context_tokens"] // 32) == ("context", 16_384 // 32)
    precision = document(run, "gemma-3-27b", "--context", "16k", "--concurrency", "3", *total)["answer"]
    assert precision["solved"] == "precision"
    assert precision["precision"] == {"weights": "int8", "kv": "int8", "window_kv": None}


def test_every_kind_of_model(run: Run, config: Path) -> None:
    typed = ["--layers", "32", "--kv-heads", "32", "--head-dim", "128", "--window", "4096", "--dtype", "fp16"]
    assert document(run, *typed)["request"]["row_bytes"] == 2_147_483_648
    for model in (config, config.parent):
        data = document(run, str(model))
        assert data["model"]["name"] == "tiny"
        assert [g["layers"] for g in data["groups"]] == [1, 2]
        assert data["answer"]["context_tokens"] == 256


def test_what_if(run: Run) -> None:
    data = document(run, "llama-3.1-8b", "--window", "4k", "--full-layers", "8", "--sinks", "4")
    assert [(k["count"], k["span"]) for k in data["model"]["kinds"]] == [(24, "window 4096 + 4 sinks"), (8, "full")]
    assert document(run, "llama-3.1-8b", "--chunk", "8k")["groups"][0]["span"] == "chunk 8192"
    data = document(run, "gemma-4-e2b", "--params", "5B", "--memory", "16GiB", "--reserve", "1GiB")
    assert data["answer"]["weight_bytes"] == 10**10
    assert data["answer"]["reserve_bytes"] == 2**30


def test_a_context_beyond_the_model_s_own_is_a_warning(run: Run) -> None:
    outcome = run("plan", "llama-3-8b", "--context", "32k", "--memory", "80GB")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert lines[1].startswith("13 requests of 32\u202f768 tokens fit")
    assert lines[3] == "one request alone: up to 32\u202f768 tokens"
    assert lines[4].startswith("warning: 24\u202f576 tokens more than the model was made for (8192)")
    assert document(run, "llama-3-8b", "--context", "32k")["answer"]["beyond_model_tokens"] == 24_576
    assert "warning" not in run("plan", "llama-3-8b", "--context", "8k").out


def test_what_does_not_fit_says_what_is_missing(run: Run) -> None:
    outcome = run("plan", "mistral-7b", "--memory", "10GiB")
    assert outcome.code == 1
    assert "weights alone take 13.5 GiB" in outcome.out
    assert "\n= " not in outcome.out, "nothing is left to share out"
    outcome = run("plan", "mistral-7b", "--kv-memory", "100MiB", "--context", "32k", "--concurrency", "2")
    assert outcome.code == 1
    assert "2 requests of 32\u202f768 tokens need 531 MiB of KV, there are 100 MiB" in outcome.out
    assert "what would fit: 531 MiB of KV memory; or 2 requests of 769 tokens\n" in outcome.out
    outcome = run("plan", "mistral-7b", "--memory", "10GiB", "--context", "4k", "--dtype", "bf16", "--json")
    answer = json.loads(outcome.out)
    assert [(way["change"], way["precision"]["weights"]) for way in answer["instead"]] == [
        ("precision", "int8"),
        ("memory", "bfloat16"),
    ]


@pytest.mark.parametrize(
    ("known", "option"),
    [
        (["mistral-7b", "--context", "32k", "--concurrency", "2", "--dtype", "int8"], "--kv-memory"),
        (["gemma-3-27b", "--context", "20000", "--concurrency", "7", "--dtype", "bf16"], "--memory"),
        (["llama-3.1-8b", "--context", "9001", "--concurrency", "3", "--dtype", "bf16"], "--memory"),
    ],
)
def test_memory_that_is_named_is_enough_as_printed(run: Run, known: list[str], option: str) -> None:
    short = run("plan", *known, option, "1MiB")
    named = re.search(r"what would fit: (?:.* KV \(.*\); or )?([\d.]+) (\w+)", short.out)
    assert short.code == 1 and named
    assert run("plan", *known, option, named[1] + named[2]).code == 0
    said = re.search(r"needs? ([\d.]+) (\w+)", run("plan", *known).out)
    assert said and (option == "--kv-memory" or run("plan", *known, option, said[1] + said[2]).code == 0)


def test_a_device_is_offered_no_more_memory(run: Run) -> None:
    outcome = run("plan", "llama-3.1-70b", "--device", "h100-sxm", "--context", "32k")
    assert outcome.code == 1
    assert "what would fit: int4 weights, bfloat16 KV (--quantization int4 --kv-cache-dtype bfloat16)\n" in outcome.out
    assert "on h100-sxm" not in outcome.out, "no times of what doesn't fit"


def test_one_request_fits_and_needs(run: Run) -> None:
    one = ["gemma-3-27b", "--dtype", "int4", "--context", "32k", "--concurrency", "1"]
    for known, words in (
        (one, "1 request of 32\u202f768 tokens needs "),
        ([*one, "--memory", "24GB"], "1 request of 32\u202f768 tokens fits 22.4 GiB with int4 weights"),
        (
            ["gemma-3-27b", "--memory", "80GB", "--concurrency", "1"],
            "1 request of up to 131\u202f072 tokens fits 74.5 GiB",
        ),
        ([*one, "--memory", "22GB"], "1 request of 32\u202f768 tokens needs "),
    ):
        assert words in run("plan", *known).out
    short = run("plan", *one, "--memory", "22GB").out.splitlines()
    assert short[2].startswith("= 17.2 GiB weights + ")


def test_a_context_far_beyond_the_memory_gets_the_longest_that_fits(run: Run) -> None:
    asked = ["gemma-3-27b", "--memory", "24GB", "--context", "10M"]
    out = run("plan", *asked).out
    narrowest = "with int4 weights, int8 KV"
    assert f"{narrowest} (--quantization int4 --kv-cache-dtype int8); or 1 request of " in out
    found = re.search(rf"; or 1 request of (\d+)\u202f(\d+) tokens {narrowest}\n", out)
    assert found
    shorter = ["--context", found[1] + found[2], "--quantization", "int4", "--kv-cache-dtype", "int8"]
    assert run("plan", *asked[:3], *shorter).code == 0


@pytest.mark.parametrize("more", [[], ["--all"], ["--json"]])
def test_nothing_at_all_fits(run: Run, more: list[str]) -> None:
    outcome = run("plan", "gemma-3-1b", "--kv-memory", "1", "--concurrency", "2", *more)
    assert outcome.code == 1
    assert "1 B of KV memory is too little" in outcome.out or json.loads(outcome.out)["answer"]["context_tokens"] == 0


def test_this_machine_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ceiling = pytest.importorskip("sash.bench.ceiling")
    top = ceiling.Ceiling(5e10, {"float32": 2e11, "bfloat16": 9e11, "int8": 1.9e12})
    monkeypatch.setattr(ceiling, "measure_apart", lambda threads: top)
    native = pytest.importorskip("sash.ops.native")
    machine = importlib.import_module("sash.spec.machine")
    monkeypatch.setattr(machine, "probe_cpu", lambda: machine.Machine(1 << 33, True))
    monkeypatch.setenv("SASH_KERNELS", "native" if native.load()[0] else "torch")
    kept = "int8" if native.load()[0] else "bfloat16"
    data = document(run, "gemma-3-270m", "--measure")
    assert data["device"] == {"name": "this machine", "measured": True}
    assert data["answer"]["precision"] == {"weights": kept, "kv": "bfloat16", "window_kv": None}
    assert 0.004 < data["times"]["decode 1"]["total_s"] < 0.02
    out = run("plan", "gemma-3-270m", "--measure").out
    assert "on this machine about: prefill" in out
    assert f"({kept} weights, bfloat16 KV)" in out and f"{kept} weights are what sash takes on this machine" in out
    asked = run("plan", "gemma-3-270m", "--measure", "--dtype", "bf16").out
    assert "(bfloat16 weights, bfloat16 KV)" in asked and "takes on this machine" not in asked
    monkeypatch.setenv("SASH_KERNELS", "torch")
    monkeypatch.setattr(machine, "probe_cpu", lambda: machine.Machine(1 << 33, False))
    precision = document(run, "gemma-3-270m", "--measure")["answer"]["precision"]
    assert precision == {"weights": "float32", "kv": "float32", "window_kv": None}


def test_times_tiers_and_ratios(run: Run) -> None:
    arguments = ["gpt-oss-20b", "--device", "h100-sxm", "--tier", "disk=1TB@2GB", "--ratio", "0.3"]
    out = run("plan", *arguments, "--all").out
    for words in ("at best: prefill", "ratio 0.3", "Kept prefixes", "931 GiB"):
        assert words in out
    kept = next(line for line in out.splitlines() if line.startswith("disk"))
    all_of_it = document(run, "gpt-oss-20b", "--device", "h100-sxm", "--context", "65536", "--answer", "32768")
    assert kept.endswith(f"{1000 * all_of_it['times']['prefill']['total_s']:.0f} ms")
    assert "give --params" in run("plan", "gemma-4-e4b", "--kv-memory", "1GiB", *arguments[1:], "--all").out
    assert not any(line.strip().startswith("ratio 0.8") for line in out.splitlines())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gema-3-27b"], "Did you mean gemma-3-27b"),
        (["no/such.gguf"], "no file, folder or preset"),
        ([], "--layers is missing"),
        (["--layers", "3", "--kv-heads", "2"], "--head-dim is missing"),
        (["gemma-3-1b", "--layers", "3"], "--layers describe a model"),
        (["gemma-3-1b", "--layers", "0"], "--layers describe a model"),
        (["--layers", "3", "--kv-heads", "2", "--head-dim", "0"], "--head-dim must be at least 1"),
        (["--layers", "3", "--kv-heads", "3", "--heads", "4", "--head-dim", "8"], "must divide --heads 4"),
        (["gemma-3-1b", "--memory", "much"], "--memory must be a number such as"),
        (["gemma-3-1b", "--kv-memory", "2XB"], "--kv-memory must be"),
        (["gemma-3-1b", "--reserve", "120%"], "--reserve must be a share"),
        (["gemma-3-1b", "--context", "-5"], "--context must be"),
        (["gemma-3-1b", "--concurrency", "0"], "--concurrency must be at least 1"),
        (["gemma-3-1b", "--dtype", "int9"], "--dtype 'int9' is unknown"),
        (["gemma-3-1b", "--kv-cache-dtype", "int4"], "--kv-cache-dtype 'int4' is unknown"),
        (["gemma-3-1b", "--window", "512", "--chunk", "512"], "contradict"),
        (["gemma-3-1b", "--window", "0"], "--window must be at least 1"),
        (["gemma-3-1b", "--sinks", "4"], "belongs to --window"),
        (["gemma-3-1b", "--full-layers", "4"], "give --window"),
        (["gemma-3-1b", "--window", "9", "--full-layers", "99"], "between 0 and the 26 layers"),
        (["gemma-3-1b", "--needs", "luck"], "--needs 'luck' is unknown"),
        (["gemma-3-1b", "--ratio", "0"], "--ratio must be above 0"),
        (["gemma-3-1b", "--tier", "disk"], "--tier must be NAME=SIZE@RATE"),
        (["gemma-3-1b", "--device", "h100"], "did you mean h100-pcie or h100-sxm"),
        (["gemma-3-1b", "--device", "h200", "--measure"], "give one of them"),
        (["gemma-3-1b", "--memory", "1GB", "--kv-memory", "1GB"], "give one of them"),
        (["gemma-3-1b", "--params", "0"], "--params must be"),
        (["gemma-3-1b", "--memory", "9" * 400], "--memory must be below 10^24"),
        (["gemma-3-1b", "--concurrency", "9" * 400], "--concurrency must be at most"),
        (["gemma-3-1b", "--page-size", "9" * 400], "--page-size must be at most"),
        (["--layers", "999999999", "--kv-heads", "2", "--head-dim", "8"], "--layers must be at most 10000"),
        (["--layers", "3", "--kv-heads", "9" * 400, "--head-dim", "8"], "--kv-heads must be at most"),
        (["gemma-3-1b", "--plot", "."], "--plot . can't be written"),
        (["gemma-3-1b", "--plot", "picture"], "name a file such as plan.svg"),
    ],
)
def test_bad_input_is_refused_by_name(run: Run, arguments: list[str], words: str) -> None:
    outcome = run("plan", *arguments)
    assert outcome.code == 2
    assert words in outcome.err


@pytest.mark.parametrize("window", [[], ["--window", "1"], ["--window", "4k"]])
def test_one_layer_is_no_hybrid(run: Run, window: list[str]) -> None:
    outcome = run("plan", "--layers", "1", "--kv-heads", "1", "--head-dim", "8", "--kv-memory", "1GB", *window, "--all")
    assert outcome.code == 0 and "pure window" in outcome.out
    assert not any(line.startswith("hybrid") for line in outcome.out.splitlines())


def test_a_context_beyond_every_float(run: Run, config: Path) -> None:
    """Pages of a ring at lengths that a float can't count."""
    values = json.loads(config.read_text()) | {"max_position_embeddings": 1 << 63}
    config.write_text(json.dumps(values))
    assert run("plan", str(config), "--window", "8", "--kv-memory", "1GB", "--context", "64", "--json").code == 0


def test_a_description_that_is_not_understood_says_what_to_do(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": ["NewForCausalLM"], "sliding_window": 5}))
    outcome = run("plan", str(path))
    assert outcome.code == 2
    assert "NewForCausalLM is not supported" in outcome.err and "--layers, --kv-heads, --head-dim" in outcome.err


def test_a_hub_id_reads_its_description_alone(run: Run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []

    def download(hub_id: str, name: str) -> str:
        asked.append((hub_id, name))
        if hub_id != "org/tiny":
            raise OSError("no network")
        return str(config)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert document(run, "org/tiny")["model"]["name"] == "org/tiny"
    outcome = run("plan", "google/gemma-3-27b-it")
    assert outcome.code == 2
    assert "The preset gemma-3-27b needs no hub" in outcome.err
    assert asked == [("org/tiny", "config.json"), ("google/gemma-3-27b-it", "config.json")]


def test_a_picture(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.svg"
    outcome = run("plan", "gemma-3-27b", "--plot", str(file))
    assert outcome.code == 0 and f"drawn: {file}" in outcome.out
    assert file.read_text().count("<path") > 8
    outcome = run("plan", "gemma-3-27b", "--plot", str(tmp_path / "plan.nothing"))
    assert outcome.code == 2 and "--plot" in outcome.err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    outcome = run("plan", "gemma-3-27b", "--plot", str(file))
    assert outcome.code == 2 and "pip install 'sash-llm[bench]'" in outcome.err


def test_the_command_loads_no_torch() -> None:
    code = (
        "import sys; from sash.cli.main import app; app(['plan', 'gemma-3-27b', '--all'], standalone_mode=False); "
        "sys.exit(', '.join(n for n in ('torch', 'numpy', 'transformers', 'huggingface_hub') if n in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
