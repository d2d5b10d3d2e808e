"""A tiny hybrid model with a tokenizer of single characters, saved once, and engines on it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tokenizers
import torch
from tests.families import build, oracle_logits
from tokenizers import decoders, models, pre_tokenizers, processors

from sash import LLM
from sash.text.fast import byte_alphabet

OPTIONS = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "page_size": 4,
    "kv_cache_memory_bytes": 1 << 21,
    "debug": True,
}
MakeLLM = Callable[..., LLM]
Scores = Callable[[list[int]], torch.Tensor]


def save_tokenizer(folder: Path) -> None:
    """Ids 0 to 2 are <pad>, <bos> and <eos>; 3 to 97 printable ASCII; then newline and the two bytes of é."""
    spelled = {byte: char for char, byte in byte_alphabet().items()}
    order = [*range(32, 127), 10, *"é".encode()]
    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {spelled[byte]: i for i, byte in enumerate(order, 3)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    inner.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Two workers share two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def _built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Scores]:
    """Window layers of 5 and a full layer, 101 tokens; and the log-probabilities that transformers gives."""
    model, folder = build("gemma3", tmp_path_factory.mktemp("tiny"))
    save_tokenizer(folder)
    return folder, lambda ids: oracle_logits(model, torch.tensor(ids)).log_softmax(-1)


@pytest.fixture(scope="session")
def folder(_built: tuple[Path, Scores]) -> Path:
    """The model's folder."""
    return _built[0]


@pytest.fixture(scope="session")
def oracle(_built: tuple[Path, Scores]) -> Scores:
    """Ids [T] to log-probabilities [T, 101] of what follows each, by a dense run of transformers."""
    return _built[1]


def poison(llm: LLM) -> LLM:
    """Fill the pools with NaN, so that a row that was never written can't pass for a number."""
    for pool in llm.core.runner.pools:
        pool.k.fill_(math.nan)
        pool.v.fill_(math.nan)
    return llm


def assert_idle(llm: LLM) -> None:
    """Nothing runs or waits, every page is free, and the books balance."""
    llm.core.scheduler.check()
    stats = llm.stats()
    assert stats["running"] == stats["waiting"] == 0
    for pool in stats["pools"]:
        assert pool["free_pages"] == pool["num_pages"] and pool["held_pages"] == pool["promised_pages"] == 0
        assert pool["requests"] == {}


@pytest.fixture
def make_llm(folder: Path) -> Iterator[MakeLLM]:
    """Builds an LLM on the tiny model; options replace those above. Afterwards every page must be free."""
    made: list[LLM] = []

    def make(model: Path = folder, **options: object) -> LLM:
        made.append(poison(LLM(model, **(OPTIONS | options))))
        return made[-1]

    yield make
    for llm in made:
        assert_idle(llm)


@pytest.fixture(scope="session")
def _shared(folder: Path) -> LLM:
    return poison(LLM(folder, **OPTIONS))


@pytest.fixture
def llm(_shared: LLM) -> Iterator[LLM]:
    """One engine for all tests that change nothing in it. Afterwards every page must be free."""
    yield _shared
    assert_idle(_shared)
