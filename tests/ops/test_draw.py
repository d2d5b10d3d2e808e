"""Draws by the kernels: the token that the noise of the whole vocabulary would choose, on each instruction set."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sash.ops import native, native_draw, sampling
from sash.spec.sampling import SamplingParams

NATIVE, NOTE = native.load()
pytestmark = pytest.mark.skipif(NATIVE is None, reason=NOTE)


def some_logits(vocabulary: int, spread: float, seed: int = 0) -> torch.Tensor:
    noise = torch.Generator().manual_seed(seed)
    return spread * torch.randn(vocabulary, generator=noise) + 40 * torch.rand(1, generator=noise) - 20


@pytest.mark.parametrize("vocabulary", [1, 2, 15, 16, 129, 1000, 8191, 8192, 8193, 50_000])
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 4.0, 30.0])
def test_the_same_token_wins(kernels: Any, vocabulary: int, spread: float) -> None:
    for seed, temperature in enumerate((1e-9, 0.0, 0.3, 1.0, 2.0, 100.0)):
        logits = some_logits(vocabulary, spread, seed)
        for position in range(4):
            own = native_draw.race(logits, temperature, seed, position)
            assert own == sampling.race(logits, temperature, seed, position)


def test_nearly_all_are_ruled_out(kernels: Any) -> None:
    for spread in (0.0, 1.0, 5.0):
        logits = some_logits(20_000, spread)
        for key in range(20):
            ids = kernels.race(logits.data_ptr(), len(logits), 1.0, key, 2)
            assert 1 <= len(ids) <= 3 and ids == sorted(ids)


def test_banned_tokens_never_win(kernels: Any) -> None:
    logits = torch.full((9000,), -math.inf)
    allowed = [0, 17, 4095, 8999]
    logits[allowed] = torch.tensor([1.0, 1.5, 0.5, 1.0])
    drawn = [native_draw.race(logits, 1.0, 3, position) for position in range(60)]
    assert drawn == [sampling.race(logits, 1.0, 3, position) for position in range(60)]
    assert set(drawn) == set(allowed)


def test_what_the_kernel_can_not_tell_is_left_to_torch(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(sampling, "race", lambda *given: asked.append(given) or 7)
    nothing = torch.full((40,), -math.inf)
    assert native_draw.race(nothing, 1.0, 0, 0) == 7 and len(asked) == 1
    assert native_draw.race(torch.zeros(40, dtype=torch.float64), 1.0, 0, 0) == 7
    assert native_draw.race(torch.zeros(80)[::2], 1.0, 0, 0) == 7


def test_where_rounding_decides_the_sum_in_float32_does() -> None:
    logits, among = some_logits(1000, 2.0), list(range(1000))
    for position in range(30):
        wanted = sampling.race(logits, 0.8, 9, position)
        assert sampling.race_among(logits, among, 0.8, 9, position) == wanted
        assert sampling.race_among(logits, [wanted], 0.8, 9, position) == wanted


@pytest.mark.parametrize(
    ("params", "whole"),
    [
        (SamplingParams(), True),
        (SamplingParams(temperature=0.2), True),
        (SamplingParams(repetition_penalty=1.3), True),
        (SamplingParams(top_k=4), False),
        (SamplingParams(top_p=0.9), False),
        (SamplingParams(min_p=0.1), False),
        (SamplingParams(temperature=0.0), False),
    ],
)
def test_only_draws_from_all_tokens_are_races(params: SamplingParams, whole: bool) -> None:
    state = sampling.sampler_state(
        params, seed=1, stop_ids=(), prompt=(1, 2), vocab_size=50, device=torch.device("cpu")
    )
    asked: list[int] = []

    def race(logits: torch.Tensor, temperature: float, seed: int, position: int) -> int:
        asked.append(position)
        return sampling.race(logits, temperature, seed, position)

    logits = some_logits(50, 1.0)
    shaped = sampling.shape_logits(logits, state, 0)
    assert sampling.choose(shaped, state, 6, race=race) == sampling.choose(shaped, state, 6)
    assert asked == [6] * whole
    some = torch.tensor([3, 9, 30])
    assert sampling.choose(shaped[some], state, 6, some, race) in (3, 9, 30) and asked == [6] * whole
