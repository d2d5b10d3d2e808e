"""lm-eval's local-completions model, unchanged, on tasks beside this file; its scores against the engine's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import run

from sash import LLM, SamplingParams
from sash.bench.serving.client import Address

pytestmark = [pytest.mark.real, pytest.mark.e2e, pytest.mark.timeout(3600)]
TASKS = Path(__file__).with_name("lm_eval")


def evaluate(python: Path, tokenizer: Path, address: Address, folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """Results by task, and the samples of the task with choices."""
    tasks = folder / "tasks"
    tasks.mkdir()
    for file in TASKS.glob("*.yaml"):
        (tasks / file.name).write_text(file.read_text().replace("DATA", str(TASKS)))
    arguments = {
        "model": "smollm2-135m",
        "base_url": f"{address.url}/v1/completions",
        "num_concurrent": 4,
        "max_length": 2048,
        "tokenizer": tokenizer,
    }
    command = [
        *(str(python), "-m", "lm_eval", "run", "--model", "local-completions"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
        *("--tasks", "local_choice,local_generate", "--include_path", str(tasks), "--batch_size", "1"),
        *("--output_path", str(folder / "out"), "--log_samples"),
    ]
    run(command, address, HF_HOME=str(folder / "hf"))
    [results] = (folder / "out").rglob("results_*.json")
    [samples] = (folder / "out").rglob("samples_local_choice_*.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    return json.loads(results.read_text())["results"], lines


def score(llm: LLM, question: str, choice: str) -> float:
    """log p(" choice" | question)."""
    whole, context = llm.tokenizer.encode(f"{question} {choice}"), llm.tokenizer.encode(question)
    [output] = llm.generate([whole], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    entries = zip(whole, output.prompt_logprobs, strict=True)
    return sum(entry[token].logprob for token, entry in list(entries)[len(context) :] if entry is not None)


def test_local_completions(
    smollm2: Address, python_of: Callable[[str], Path], tokenizer_of: Callable[[str], Path], tmp_path: Path
) -> None:
    results, samples = evaluate(python_of("lm-eval"), tokenizer_of("smollm2-135m"), smollm2, tmp_path)
    assert results["local_generate"]["exact_match,none"] > 0.5
    assert results["local_choice"]["acc,none"] > 0.6
    llm = LLM("smollm2-135m", max_num_seqs=8, max_model_len=2048)
    for sample in samples:
        document = sample["doc"]
        theirs = [float(answer[0]) for answer in sample["filtered_resps"]]
        ours = [score(llm, document["question"], choice) for choice in document["choices"]]
        assert theirs == pytest.approx(ours, abs=0.05), document
