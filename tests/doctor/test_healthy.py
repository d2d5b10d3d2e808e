"""A healthy engine of any kind gives doctor nothing to find, and it has looked at everything that the kind has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.doctor.kinds import KINDS, findings, of_family, of_kind, options, wrong
from tests.equivalence.harness import tiny_spec
from tests.families import FAMILIES

from sash.doctor import exam
from sash.doctor.finding import Status, exit_code
from sash.doctor.reference import Reference
from sash.ops import sampling
from sash.spec.span import Span

# Checks that need what a kind lacks.
SKIPPED = {
    "full": {"mask-edge", "chunk-and-window", "short-text"},
    "window in prefill": {"chunk-and-window", "short-text"},
    "window of one": {"mask-edge", "positions-absolute"},
}


@pytest.mark.parametrize("stored", ["float32", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_found(kind: str, stored: str) -> None:
    found = of_kind(kind, kv_cache_dtype=stored)
    assert wrong(found) == []
    assert exit_code(found.values()) == 0
    unseen = {f.name for f in found.values() if f.status is Status.SKIPPED}
    assert unseen == SKIPPED.get(kind, set()), {f.name: f.evidence for f in found.values() if f.name in unseen}


@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 1},
        {"page_size": 16},
        {"deterministic": True},
        {"speculative": "ngram"},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"dtype": "bfloat16", "kv_cache_dtype": "int8", "swa_kv_cache_dtype": "bfloat16"},
        {"max_num_batched_tokens": 512},
        {"max_num_seqs": 1},
    ],
    ids=lambda changes: " ".join(f"{k}={v}" for k, v in changes.items()),
)
def test_nothing_is_found_with_options(changes: dict[str, object]) -> None:
    assert wrong(of_kind("hybrid", **changes)) == []


@pytest.mark.parametrize("kernels", ["torch", "reference"])
def test_slow_kernels_are_all_that_is_found(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SASH_KERNELS", kernels)
    assert [f.name for f in wrong(of_kind("hybrid"))] == ["kernels"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"llama-dynamic-grown"}))  # that one's context is 20 tokens
def test_nothing_is_found_on_any_family(name: str, dtype: str, tmp_path: Path) -> None:
    assert wrong(of_family(name, tmp_path, dtype=dtype)) == []


def test_nothing_is_found_on_experts_that_rounding_sends_elsewhere(tmp_path: Path) -> None:
    assert wrong(of_family("gpt-oss", tmp_path, dtype="bfloat16")) == []


def test_a_difference_of_scores_is_explained_where_it_is_rounding() -> None:
    rounded = of_kind("hybrid", dtype="bfloat16", quantization="int8", kv_cache_dtype="int8")["exact"]
    found = re.search(
        r"typically (\S+) apart .*; that is normal, and rounding: int8 weights, int8 K and V\. As much noise moves the "
        r"dense run's own scores by (\S+) typically, (\S+) at most",
        rounded.evidence,
    )
    assert rounded.status is Status.OK and found
    typical, noise, most = map(float, found.groups())
    assert 0 < typical < 3 * noise and noise < most
    exact = of_kind("hybrid")["exact"]
    assert "rounding: float32 weights, float32 K and V" in exact.evidence


def test_each_text_is_read_densely_once_and_one_of_them_once_more_under_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, read = Reference.scores, []

    def scores(self: Reference, tokens: Sequence[int], *more: Any) -> list[torch.Tensor]:
        read.append((tuple(tokens), self.jitter > 0))
        return plain(self, tokens, *more)

    monkeypatch.setattr(Reference, "scores", scores)
    assert wrong(of_kind("hybrid")) == []
    assert len(set(read)) == len(read) == 1 + 3 + 1 + 1 and read[-1] == (read[0][0], True)


def test_an_answer_is_drawn_from_a_few_tokens_and_differs_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def gumbel(seed: int, position: int, ids: torch.Tensor) -> torch.Tensor:
        drawn.append((seed, len(ids)))
        return plain(seed, position, ids)

    plain = sampling.gumbel
    monkeypatch.setattr(sampling, "gumbel", gumbel)
    monkeypatch.setattr(exam, "_DRAWN", 8)
    assert wrong(of_kind("hybrid")) == []
    assert {seed for seed, _ in drawn} >= {0, 1, 2} and {count for _, count in drawn} == {8}


def test_soft_caps_learned_sinks_and_no_angles() -> None:
    spec = tiny_spec([Span.sliding(7), Span.full()], softcap=4.0, learned_sinks=True)
    assert wrong(findings(spec, options())) == []
    spec = tiny_spec([Span.sliding(7), Span.full()], rope=None)
    found = findings(spec, options())
    assert wrong(found) == [] and found["positions-absolute"].status is Status.SKIPPED


def test_a_window_that_no_text_can_pass_is_told() -> None:
    spec = replace(tiny_spec([Span.sliding(9000), Span.full()]), max_position=300)
    found = findings(spec, options(max_num_batched_tokens=512))
    assert wrong(found) == []
    assert found["mask-edge"].status is Status.SKIPPED and "9000" in found["mask-edge"].evidence
