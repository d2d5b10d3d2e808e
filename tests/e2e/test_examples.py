"""Every example, as its first lines say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.conftest import run

from sash.bench.serving.client import Address

pytestmark = [pytest.mark.real, pytest.mark.e2e, pytest.mark.timeout(1800)]
EXAMPLES = Path(__file__).parents[2] / "examples"
# File: environment, and what it must print.
RUNS = {
    "openai_chat.py": (None, ["Paris", "tokens read"]),
    "structured.py": (None, ["name=", "size='"]),
    "tools.py": (None, ["weather({'place': '"]),
    "litellm_chat.py": ("litellm", ["Paris"]),
    "langchain_chat.py": ("langchain", ["Paris", "'output_tokens'"]),
}


@pytest.mark.parametrize("file", RUNS)
def test_an_example_says_what_it_should(file: str, smollm2: Address, python_of: Callable[[str], Path]) -> None:
    environment, words = RUNS[file]
    python = sys.executable if environment is None else str(python_of(environment))
    told = run([python, str(EXAMPLES / file)], smollm2)
    assert all(word in told for word in words), told


def test_many_texts_at_once(gemma: Address) -> None:
    told = run([sys.executable, str(EXAMPLES / "openai_many.py")], gemma)
    assert len(told.splitlines()) == 4 and all("|" in line for line in told.splitlines()), told


def test_examples_are_short_and_all_of_them_are_run() -> None:
    files = {file.name: file for file in EXAMPLES.glob("*.py")}
    assert set(files) == {*RUNS, "openai_many.py"}
    assert all(len(file.read_text().splitlines()) < 40 for file in files.values())
